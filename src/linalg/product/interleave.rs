//! Packing for f32 products: rows of a factor side by side, `[steps, rows of a block]`, widened to f32.
//!
//! This transposes a block. With AVX and blocks of at least 8 rows, 8 × 8 elements are transposed in registers; otherwise the elements
//! are moved one by one. Products of 128 tokens spend an eighth of their time on packing in registers, and a third on moving elements.

use half::bf16;
use pulp::{Arch, Simd, WithSimd};

use super::packed::{Line, Strided, Values};

/// `inner` is packed in multiples of this, so that blocks of any size are whole lines.
pub(super) const DEPTH: usize = 16;
/// Rows and columns that are transposed in registers.
const EIGHT: usize = 8;
/// Elements of a row of f16 that are widened per call.
const LONG: usize = 128;

/// Packs rows of a factor, `width` rows at a time, with zeros up to whole blocks.
pub(in super::super) fn interleave(
    factor: Strided<'_>,
    count: usize,
    inner: usize,
    width: usize,
    packed: &mut [Line],
) {
    Arch::new().dispatch(Interleave {
        factor,
        count,
        inner,
        width,
        packed: bytemuck::cast_slice_mut(packed),
    });
}

/// The loops of [`interleave`], compiled for the CPU's registers.
struct Interleave<'a> {
    factor: Strided<'a>,
    count: usize,
    inner: usize,
    width: usize,
    packed: &'a mut [f32],
}

impl WithSimd for Interleave<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match self.width {
            2 => self.of::<2>(),
            6 => self.of::<6>(),
            8 => self.of::<8>(),
            12 => self.of::<12>(),
            16 => self.of::<16>(),
            48 => self.of::<48>(),
            width => unreachable!("no CPU has blocks of {width}"),
        }
    }
}

impl Interleave<'_> {
    #[inline(always)]
    fn of<const WIDTH: usize>(self) {
        let Self { factor, count, inner, packed, .. } = self;
        let steps = inner.next_multiple_of(DEPTH);
        let blocks = packed.chunks_exact_mut(steps * WIDTH).enumerate();
        for (block, packed) in blocks.take(count.div_ceil(WIDTH)) {
            let first = block * WIDTH;
            let present = (count - first).min(WIDTH);
            if present < WIDTH || inner < steps {
                packed.fill(0.0);
            }
            let packed = packed.as_chunks_mut::<WIDTH>().0;
            if factor.is_transposed {
                for (k, packed) in packed[..inner].iter_mut().enumerate() {
                    let at = k * factor.stride + first;
                    factor.values.widen(at, &mut packed[..present]);
                }
                continue;
            }
            let stride = factor.stride;
            match factor.at(first, 0).values {
                Values::F32(values) => side_by_side(values, stride, present, inner, packed),
                Values::Bf16(values) => side_by_side(values, stride, present, inner, packed),
                values @ Values::F16(_) => {
                    let mut wide = [[0.0f32; LONG]; WIDTH];
                    for (piece, packed) in packed.chunks_mut(LONG).enumerate() {
                        let k = piece * LONG;
                        let some = LONG.min(inner.saturating_sub(k));
                        for (row, wide) in wide[..present].iter_mut().enumerate() {
                            values.widen(row * stride + k, &mut wide[..some]);
                        }
                        side_by_side(wide.as_flattened(), LONG, present, some, packed);
                    }
                }
            }
        }
    }
}

/// Elements that can be widened to f32.
trait Element: Copy {
    /// Widens as many elements as `wide` holds.
    fn widen(values: &[Self], out: &mut [f32]);
}

impl Element for f32 {
    #[inline(always)]
    fn widen(values: &[Self], out: &mut [f32]) {
        out.copy_from_slice(&values[..out.len()]);
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(values: &[Self], out: &mut [f32]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = f32::from_bits(u32::from(value.to_bits()) << 16);
        }
    }
}

/// The first `present` rows of a matrix as columns of `packed`; `values` are `[present, inner]`, rows `stride` elements apart.
#[inline(always)]
fn side_by_side<E: Element, const WIDTH: usize>(
    values: &[E],
    stride: usize,
    present: usize,
    inner: usize,
    packed: &mut [[f32; WIDTH]],
) {
    let exchange = Exchange::here();
    // Some elements of every row at a time, so that the written lines stay in the first-level cache.
    for (chunk, packed) in packed.as_chunks_mut::<DEPTH>().0.iter_mut().enumerate() {
        let k = chunk * DEPTH;
        let some = DEPTH.min(inner.saturating_sub(k));
        if some == 0 {
            break;
        }
        let mut row = 0;
        if let Some(exchange) = exchange
            && WIDTH.is_multiple_of(group::<WIDTH>())
            && some == DEPTH
        {
            while row + group::<WIDTH>() <= present {
                exchange.rows(&values[row * stride + k..], stride, row, packed);
                row += group::<WIDTH>();
            }
        }
        for row in row..present {
            let mut wide = [0.0f32; DEPTH];
            E::widen(&values[row * stride + k..], &mut wide[..some]);
            for (packed, value) in packed.iter_mut().zip(&wide) {
                packed[row] = *value;
            }
        }
    }
}

/// Rows that are transposed at once.
const fn group<const WIDTH: usize>() -> usize {
    if WIDTH < EIGHT { WIDTH } else { EIGHT }
}

/// Transposes in registers, on CPUs with instructions for it.
#[derive(Clone, Copy)]
pub(super) struct Exchange {
    #[cfg(target_arch = "x86_64")]
    simd: pulp::x86::V3,
}

impl Exchange {
    #[cfg(target_arch = "x86_64")]
    pub(super) fn here() -> Option<Self> {
        pulp::x86::V3::try_new().map(|simd| Self { simd })
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn here() -> Option<Self> {
        None
    }

    /// Transposes a square of words.
    #[inline(always)]
    pub(super) fn turned(self, square: &[[u32; DEPTH]; DEPTH], out: &mut [[u32; DEPTH]]) {
        // Loops in place of closures, which would not be compiled for the registers of their caller.
        let square: &[[f32; DEPTH]; DEPTH] = bytemuck::cast_ref(square);
        let out: &mut [[f32; DEPTH]] = bytemuck::cast_slice_mut(out);
        for (block, rows) in square.as_chunks::<EIGHT>().0.iter().enumerate() {
            for half in 0..DEPTH / EIGHT {
                let mut part = [[0.0f32; EIGHT]; EIGHT];
                for (part, row) in part.iter_mut().zip(rows) {
                    *part = row.as_chunks::<EIGHT>().0[half];
                }
                let columns = self.rows_and_columns(part);
                let out = &mut out[half * EIGHT..][..EIGHT];
                for (out, column) in out.iter_mut().zip(&columns) {
                    out.as_chunks_mut::<EIGHT>().0[block] = *column;
                }
            }
        }
    }

    /// Writes [`DEPTH`] elements of some rows as columns of `packed`, from column `first` on.
    #[inline(always)]
    fn rows<E: Element, const WIDTH: usize>(
        self,
        values: &[E],
        stride: usize,
        first: usize,
        packed: &mut [[f32; WIDTH]; DEPTH],
    ) {
        let rows = group::<WIDTH>();
        let mut wide = [[0.0f32; DEPTH]; EIGHT];
        for (row, wide) in wide[..rows].iter_mut().enumerate() {
            E::widen(&values[row * stride..][..DEPTH], wide);
        }
        for (half, packed) in packed.as_chunks_mut::<EIGHT>().0.iter_mut().enumerate() {
            let mut square = [[0.0f32; EIGHT]; EIGHT];
            for (square, wide) in square.iter_mut().zip(&wide) {
                *square = wide.as_chunks::<EIGHT>().0[half];
            }
            let columns = self.rows_and_columns(square);
            for (packed, column) in packed.iter_mut().zip(&columns) {
                packed[first..first + rows].copy_from_slice(&column[..rows]);
            }
        }
    }

    /// Exchanges single elements, then pairs within each half of a register, then the halves.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn rows_and_columns(self, rows: [[f32; EIGHT]; EIGHT]) -> [[f32; EIGHT]; EIGHT] {
        const LOW: i32 = 0b01_00_01_00;
        const HIGH: i32 = 0b11_10_11_10;
        const FIRST_HALVES: i32 = 0x20;
        const SECOND_HALVES: i32 = 0x31;
        let avx = self.simd.avx;
        let [a, b, c, d, e, f, g, h] = rows.map(pulp::cast);
        let (ab, cd) = (avx._mm256_unpacklo_ps(a, b), avx._mm256_unpacklo_ps(c, d));
        let (ef, gh) = (avx._mm256_unpacklo_ps(e, f), avx._mm256_unpacklo_ps(g, h));
        let (ab_high, cd_high) = (avx._mm256_unpackhi_ps(a, b), avx._mm256_unpackhi_ps(c, d));
        let (ef_high, gh_high) = (avx._mm256_unpackhi_ps(e, f), avx._mm256_unpackhi_ps(g, h));
        let upper = [
            avx._mm256_shuffle_ps::<LOW>(ab, cd),
            avx._mm256_shuffle_ps::<HIGH>(ab, cd),
            avx._mm256_shuffle_ps::<LOW>(ab_high, cd_high),
            avx._mm256_shuffle_ps::<HIGH>(ab_high, cd_high),
        ];
        let lower = [
            avx._mm256_shuffle_ps::<LOW>(ef, gh),
            avx._mm256_shuffle_ps::<HIGH>(ef, gh),
            avx._mm256_shuffle_ps::<LOW>(ef_high, gh_high),
            avx._mm256_shuffle_ps::<HIGH>(ef_high, gh_high),
        ];
        let mut columns = [[0.0; EIGHT]; EIGHT];
        let (first, second) = columns.split_at_mut(EIGHT / 2);
        for ((upper, lower), (first, second)) in
            upper.into_iter().zip(lower).zip(first.iter_mut().zip(second))
        {
            *first = pulp::cast(avx._mm256_permute2f128_ps::<FIRST_HALVES>(upper, lower));
            *second = pulp::cast(avx._mm256_permute2f128_ps::<SECOND_HALVES>(upper, lower));
        }
        columns
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn rows_and_columns(self, rows: [[f32; EIGHT]; EIGHT]) -> [[f32; EIGHT]; EIGHT] {
        std::array::from_fn(|column| std::array::from_fn(|row| rows[row][column]))
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_element_is_where_blocks_read_it_and_what_is_missing_is_zero() {
        let count = 21usize;
        // Longer and shorter than the elements widened at once.
        for inner in [45, LONG, 2 * LONG + 45] {
            let stride = inner + 5;
            let exact: Vec<f32> = (1..=count * stride).map(|i| (i % 251) as f32).collect();
            let half: Vec<bf16> = exact.iter().map(|&value| bf16::from_f32(value)).collect();
            let half_precision: Vec<f16> =
                exact.iter().map(|&value| f16::from_f32(value)).collect();
            let all = [Values::F32(&exact), Values::Bf16(&half), Values::F16(&half_precision)];
            for values in all {
                for width in [2usize, 6, 8, 12, 16, 48] {
                    for is_transposed in [false, true] {
                        let factor = if is_transposed {
                            Strided::transposed(values, count)
                        } else {
                            Strided::rows(values, stride)
                        };
                        let at = |row, k| {
                            if is_transposed { k * count + row } else { row * stride + k }
                        };
                        let steps = inner.next_multiple_of(DEPTH);
                        let rows = count.next_multiple_of(width);
                        let mut packed = vec![Line([0xffff; 32]); rows * steps / 16];
                        interleave(factor, count, inner, width, &mut packed);
                        let packed: &[f32] = bytemuck::cast_slice(&packed);
                        for row in 0..rows {
                            for k in 0..steps {
                                let place = row / width * steps * width + k * width + row % width;
                                let expected =
                                    if row < count && k < inner { exact[at(row, k)] } else { 0.0 };
                                assert_eq!(packed[place], expected, "{width}: row {row}, step {k}");
                            }
                        }
                    }
                }
            }
        }
    }
}
