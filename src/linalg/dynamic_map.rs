//! The dynamic maps of 8-bit numbers: 256 values in [-1, 1] or [0, 1] whose spacing grows with their size.
//!
//! ```text
//! decade i = 0…6 is 10^(i-6) · [0.1, 1], cut into 2^i (signed) or 2^(i+1) (unsigned) equal intervals
//! map      = middles of the intervals, with both signs in the signed map, and 0 and 1, sorted
//! code(x)  = number of middles between neighbours of the map that are below x
//! ```
//!
//! A value in the middle of two codes takes the lower code. -1 is not in the signed map. The arithmetic is f32, so the values
//! equal the reference's to the bit.
//!
//! Source: T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit optimizers via block-wise quantization" (2021, arXiv 2110.02861),
//! §2.3; the reference is `create_dynamic_map` of bitsandbytes 0.50.

use std::sync::LazyLock;

/// Decades of the maps.
const DECADES: i32 = 7;

/// Mantissa bits of a cell. At 7 bits no cell holds two middles; a test checks every cell.
const CELL_BITS: u32 = 7;
/// Bits of an f32 below the bits of a cell.
const CELL_SHIFT: u32 = 23 - CELL_BITS;
/// The biased exponent of the first cell: numbers below 2^-23 share it, since no middle is that small.
const FIRST_EXPONENT: u32 = 127 - 23;
/// The cell of 1 and of everything above.
const LAST_CELL: usize = (23 << CELL_BITS) as usize;
/// Cells per sign.
const CELLS: usize = LAST_CELL + 1;

/// A map, and the tables that find the code of a number without a search.
#[derive(Debug)]
pub struct DynamicMap {
    values: [f32; 256],
    /// Middles between neighbours. The last is +∞: there is no code above 255.
    middles: [f32; 256],
    /// The code of the smallest number of every cell: positive cells, then negative cells.
    first_codes: Vec<u8>,
}

static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(true));
static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(false));

impl DynamicMap {
    /// The map of [-1, 1].
    pub fn signed() -> &'static Self {
        &SIGNED
    }

    /// The map of [0, 1].
    pub fn unsigned() -> &'static Self {
        &UNSIGNED
    }

    /// The values of codes 0 to 255, ascending.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code of the value nearest to `x`. NaN has the code of 0.
    #[inline(always)]
    pub fn code(&self, x: f32) -> u8 {
        let x = if x.is_nan() { 0.0 } else { x };
        let first = self.first_codes[cell(x)];
        first + u8::from(x > self.middles[usize::from(first)])
    }

    fn new(is_signed: bool) -> Self {
        let mut values = Vec::with_capacity(256);
        for decade in 0..DECADES {
            let intervals = 1u32 << (decade + i32::from(!is_signed));
            // The power is a Python float there, rounded to f32 by the product.
            let scale = 10f64.powi(decade - (DECADES - 1)) as f32;
            for interval in 0..intervals {
                let [low, high] = [interval, interval + 1].map(|at| boundary(at, intervals));
                let value = scale * ((low + high) / 2.0);
                values.push(value);
                if is_signed {
                    values.push(-value);
                }
            }
        }
        values.extend([0.0, 1.0]);
        values.sort_by(f32::total_cmp);
        let mut map = [0.0; 256];
        map.copy_from_slice(&values);
        let mut middles = [f32::INFINITY; 256];
        for (middle, pair) in middles.iter_mut().zip(map.windows(2)) {
            *middle = (pair[0] + pair[1]) * 0.5;
        }
        let first_codes = [false, true].into_iter().flat_map(|is_negative| {
            (0..CELLS).map(move |cell| {
                let smallest = smallest_of(cell, is_negative);
                middles.partition_point(|&middle| middle < smallest) as u8
            })
        });
        Self { values: map, middles, first_codes: first_codes.collect() }
    }
}

/// Boundary number `at` of [0.1, 1] cut into `intervals` equal parts, with the arithmetic of `torch.linspace`: fused multiply-adds from
/// the nearer end.
fn boundary(at: u32, intervals: u32) -> f32 {
    let (start, end) = (0.1f32, 1.0f32);
    let step = (end - start) / intervals as f32;
    if at < intervals.div_ceil(2) {
        step.mul_add(at as f32, start)
    } else {
        (-step).mul_add((intervals - at) as f32, end)
    }
}

/// The cell of a number: its sign, exponent and first mantissa bits.
#[inline(always)]
fn cell(x: f32) -> usize {
    let bits = x.to_bits();
    let magnitude = (bits & 0x7fff_ffff) >> CELL_SHIFT;
    let cell = magnitude.saturating_sub(FIRST_EXPONENT << CELL_BITS) as usize;
    cell.min(LAST_CELL) + (bits >> 31) as usize * CELLS
}

/// The smallest number of a cell.
fn smallest_of(cell: usize, is_negative: bool) -> f32 {
    let bits = |cell: usize| ((FIRST_EXPONENT << CELL_BITS) + cell as u32) << CELL_SHIFT;
    match (cell, is_negative) {
        (0, false) => 0.0,
        (_, false) => f32::from_bits(bits(cell)),
        (LAST_CELL, true) => f32::NEG_INFINITY,
        // The last number before the next cell.
        (_, true) => -f32::from_bits(bits(cell + 1) - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::golden_tests::golden_f32;

    fn searched(map: &DynamicMap, x: f32) -> u8 {
        map.middles.partition_point(|&middle| middle < x) as u8
    }

    #[test]
    fn both_maps_are_those_of_the_reference_bit_for_bit() {
        for (name, map) in [("signed", DynamicMap::signed()), ("unsigned", DynamicMap::unsigned())]
        {
            let Some(expected) = golden_f32("bnb.dynamic-maps.safetensors", name) else {
                return;
            };
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(map.values()), bits(&expected), "{name}");
        }
    }

    #[test]
    fn the_table_finds_the_code_that_a_search_finds() {
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            let around = |x: f32| [x.next_down(), x, x.next_up(), -x];
            let cells = (0..CELLS)
                .flat_map(|cell| [false, true].map(|is_negative| smallest_of(cell, is_negative)));
            let middles = map.middles.into_iter().filter(|middle| middle.is_finite());
            let values = map.values.into_iter();
            let extremes = [0.0, f32::MIN_POSITIVE, 1e-30, f32::MAX, 2f32.powi(-23)];
            for x in cells.chain(middles).chain(values).chain(extremes) {
                for x in around(x).into_iter().filter(|x| !x.is_nan()) {
                    assert_eq!(map.code(x), searched(map, x), "{x:e}");
                }
            }
            for (code, &value) in map.values.iter().enumerate() {
                assert_eq!(usize::from(map.code(value)), code);
            }
        }
    }

    #[test]
    fn zero_and_nan_have_the_code_of_zero() {
        for (map, zero) in [(DynamicMap::signed(), 127), (DynamicMap::unsigned(), 0)] {
            for x in [0.0, -0.0, f32::NAN] {
                assert_eq!(map.code(x), zero);
            }
            assert_eq!(map.values[usize::from(zero)].to_bits(), 0);
        }
    }
}
