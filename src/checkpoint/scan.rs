//! One pass over a stored tensor: zeros, the fewest zeros of its N:M groups, elements that are not finite, and differences from the
//! same tensor of a second checkpoint.
//!
//! Each thread reads and checks its own pieces, so memory is two pieces per thread for a tensor of any size. Sums and minima do not
//! depend on the order of the pieces.

use rayon::prelude::*;

use super::elements::{FloatBits, element_bytes, float_bits, is_changed, row_and_column, value};
use super::header::TensorEntry;
use super::source::Checkpoint;
use super::weight_source::WeightSource;

/// The sizes of examined groups, in elements along the last dimension.
pub const GROUP_SIZES: [usize; 5] = [2, 4, 8, 16, 32];

/// Elements whose zeros are collected in one word; a multiple of every group size.
const BLOCK: usize = 32;

/// Bytes that a thread reads at once: many blocks of any element size, and little memory for any number of threads.
const PIECE_BYTES: u64 = 256 << 10;

/// The result for a tensor. Elements are counted only in f32, f16 and bf16; `compared.is_identical` is known for every type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scan {
    /// Elements equal to 0, of either sign.
    pub zeros: u64,
    /// Infinities and NaNs.
    pub non_finite: u64,
    /// For each of [`GROUP_SIZES`], the fewest zeros in any aligned group along the last dimension; `None` where that
    /// dimension is not a multiple of the group.
    pub fewest_zeros: [Option<u32>; GROUP_SIZES.len()],
    /// The comparison with the same tensor of a second checkpoint; `None` without a second checkpoint.
    pub compared: Option<Compared>,
}

/// A tensor compared with the same tensor of the checkpoint it may be a pruned copy of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compared {
    /// Every byte is equal.
    pub is_identical: bool,
    /// Elements that are zero in both.
    pub zeros_before: u64,
    /// Elements that are not +0 and whose bits differ from the second checkpoint's.
    pub changed: u64,
    /// The first changed element.
    pub first_changed: Option<ChangedElement>,
}

/// An element that is neither pruned nor unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChangedElement {
    /// Its flat index in the tensor.
    at: usize,
    /// Its row.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// Its value in the second checkpoint.
    pub before: f32,
    /// Its value here.
    pub now: f32,
}

/// Examines every element of `entry`, a tensor of `checkpoint`, and compares it with `other`, the same tensor elsewhere.
///
/// # Errors
/// Fails when a file cannot be read, and when the two tensors differ in dtype or shape.
pub fn scan_tensor(
    checkpoint: &dyn WeightSource,
    entry: &TensorEntry,
    other: Option<(&Checkpoint, &TensorEntry)>,
) -> anyhow::Result<Scan> {
    if let Some((_, other)) = other
        && (other.dtype, &other.shape) != (entry.dtype, &entry.shape)
    {
        anyhow::bail!(
            "tensor `{}` is {} {:?} here and {} {:?} there",
            entry.name,
            entry.dtype,
            entry.shape,
            other.dtype,
            other.shape
        );
    }
    let pieces = entry.bytes.div_ceil(PIECE_BYTES);
    (0..pieces)
        .into_par_iter()
        .map_init(
            || (Vec::new(), Vec::new()),
            |(now, before), piece| {
                let start = piece * PIECE_BYTES;
                let length = (entry.bytes - start).min(PIECE_BYTES) as usize;
                now.resize(length, 0);
                checkpoint.read(entry, start, now)?;
                let before = match other {
                    Some((other, other_entry)) => {
                        before.resize(length, 0);
                        other.read(other_entry, start, before)?;
                        Some(&before[..])
                    }
                    None => None,
                };
                Ok(scan_piece(entry, start, now, before))
            },
        )
        .try_reduce(|| Scan::of_nothing(entry, other.is_some()), |one, other| Ok(one.and(other)))
}

impl Scan {
    fn of_nothing(entry: &TensorEntry, is_compared: bool) -> Self {
        let columns = entry.shape.last().copied().unwrap_or(1);
        Self {
            zeros: 0,
            non_finite: 0,
            fewest_zeros: GROUP_SIZES
                .map(|m| (columns > 0 && columns.is_multiple_of(m)).then_some(m as u32)),
            compared: is_compared.then_some(Compared {
                is_identical: true,
                zeros_before: 0,
                changed: 0,
                first_changed: None,
            }),
        }
    }

    /// Adds the result of a piece.
    fn and(mut self, other: Self) -> Self {
        self.zeros += other.zeros;
        self.non_finite += other.non_finite;
        for (fewest, other) in self.fewest_zeros.iter_mut().zip(other.fewest_zeros) {
            *fewest = (*fewest).min(other);
        }
        if let (Some(one), Some(other)) = (&mut self.compared, other.compared) {
            one.is_identical &= other.is_identical;
            one.zeros_before += other.zeros_before;
            one.changed += other.changed;
            one.first_changed = [one.first_changed, other.first_changed]
                .into_iter()
                .flatten()
                .min_by_key(|changed| changed.at);
        }
        self
    }
}

/// Examines the bytes `now` from byte `start` of the tensor on.
fn scan_piece(entry: &TensorEntry, start: u64, now: &[u8], before: Option<&[u8]>) -> Scan {
    let mut scan = Scan::of_nothing(entry, before.is_some());
    if let (Some(compared), Some(before)) = (&mut scan.compared, before) {
        compared.is_identical = now == before;
    }
    let Some(bits) = float_bits(entry.dtype) else {
        return scan;
    };
    match element_bytes(entry.dtype) {
        4 => scan_elements::<4>(&mut scan, bits, now),
        _ => scan_elements::<2>(&mut scan, bits, now),
    }
    if let (Some(compared), Some(before)) = (&mut scan.compared, before) {
        let first = match element_bytes(entry.dtype) {
            4 => compare_elements::<4>(compared, bits, now, before),
            _ => compare_elements::<2>(compared, bits, now, before),
        };
        let each = element_bytes(entry.dtype);
        compared.first_changed = first.map(|index| {
            let at = start as usize / each + index;
            let (row, column) = row_and_column(entry, at);
            let range = index * each..(index + 1) * each;
            ChangedElement {
                at,
                row,
                column,
                before: value(entry.dtype, &before[range.clone()]),
                now: value(entry.dtype, &now[range]),
            }
        });
    }
    scan
}

/// An element's bits, in the lower part of a word.
#[inline]
fn word<const BYTES: usize>(element: &[u8; BYTES]) -> u32 {
    let mut bytes = [0; 4];
    bytes[..BYTES].copy_from_slice(element);
    u32::from_le_bytes(bytes)
}

/// The factor that moves eight bytes of 0 or 1 to the eight bits of the upper byte, the first to the lowest bit.
const GATHER: u64 = 0x0102_0408_1020_4080;

/// Counts zeros, groups, infinities and NaNs. A piece begins at a block. Where rows are whole groups, flat groups are the rows' groups.
fn scan_elements<const BYTES: usize>(scan: &mut Scan, bits: FloatBits, now: &[u8]) {
    let (elements, _) = now.as_chunks::<BYTES>();
    let mut seen = [u32::MAX; GROUP_SIZES.len()];
    for block in elements.chunks(BLOCK) {
        // Bytes are set first and packed to bits after, so that the loop over elements becomes vector instructions.
        let (mut flags, mut non_finite) = ([0u8; BLOCK], 0u32);
        for (flag, element) in flags.iter_mut().zip(block) {
            let word = word(element);
            *flag = u8::from(word & bits.magnitude == 0);
            non_finite += u32::from(word & bits.exponent == bits.exponent);
        }
        let mut zeros = 0u32;
        for (index, eight) in flags.as_chunks::<8>().0.iter().enumerate() {
            let gathered = u64::from_le_bytes(*eight).wrapping_mul(GATHER) >> 56;
            zeros |= (gathered as u32) << (8 * index);
        }
        scan.non_finite += u64::from(non_finite);
        let counts = zeros_in_groups(zeros);
        scan.zeros += u64::from(counts[GROUP_SIZES.len() - 1]);
        for (at, m) in GROUP_SIZES.into_iter().enumerate() {
            // A minimum of 0 cannot fall, and a word equal to the last word adds no information.
            let Some(fewest) = scan.fewest_zeros[at].as_mut().filter(|fewest| **fewest > 0) else {
                continue;
            };
            if counts[at] == seen[at] {
                continue;
            }
            let group = u32::MAX >> (BLOCK - m);
            for first in (0..block.len()).step_by(m) {
                *fewest = (*fewest).min(counts[at] >> first & group);
            }
            if block.len() == BLOCK {
                seen[at] = counts[at];
            }
        }
    }
}

/// Counts the set bits in each group of a word, for groups of 2, 4, 8, 16 and 32; each count is stored in the bits of its group.
fn zeros_in_groups(word: u32) -> [u32; GROUP_SIZES.len()] {
    let two = word - (word >> 1 & 0x5555_5555);
    let four = (two & 0x3333_3333) + (two >> 2 & 0x3333_3333);
    let eight = (four & 0x0f0f_0f0f) + (four >> 4 & 0x0f0f_0f0f);
    let sixteen = (eight & 0x00ff_00ff) + (eight >> 8 & 0x00ff_00ff);
    let all = (sixteen & 0xffff) + (sixteen >> 16);
    [two, four, eight, sixteen, all]
}

/// Compares element by element; returns the index of the first that changed.
fn compare_elements<const BYTES: usize>(
    compared: &mut Compared,
    bits: FloatBits,
    now: &[u8],
    before: &[u8],
) -> Option<usize> {
    let ((now, _), (before, _)) = (now.as_chunks::<BYTES>(), before.as_chunks::<BYTES>());
    let mut first = None;
    // Counts of 32 bits suffice for so few elements, and become vector instructions.
    const AT_ONCE: usize = 8 * BLOCK;
    let chunks = now.chunks(AT_ONCE).zip(before.chunks(AT_ONCE));
    for (index, (now, before)) in chunks.enumerate() {
        let (mut zeros_before, mut changed) = (0u32, 0u32);
        for (now, before) in now.iter().zip(before) {
            let (now, before) = (word(now), word(before));
            zeros_before += u32::from((now | before) & bits.magnitude == 0);
            // The same as `is_changed`, on words.
            changed += u32::from((now != before) & (now != 0));
        }
        compared.zeros_before += u64::from(zeros_before);
        compared.changed += u64::from(changed);
        if changed > 0 && first.is_none() {
            let mut pairs = now.iter().zip(before);
            let found = pairs.position(|(now, before)| is_changed(now, before));
            first = found.map(|at| index * AT_ONCE + at);
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use safetensors::Dtype;

    use super::super::test_files::{TestTensor, element, file_bytes, folder, write};
    use super::super::{SINGLE_FILE, TensorEntry};
    use super::*;

    /// A checkpoint with the single matrix `w`.
    fn checkpoint(folder: &Path, dtype: Dtype, shape: [usize; 2], values: &[f32]) -> Checkpoint {
        let data = values.iter().flat_map(|&value| element(dtype, value)).collect();
        let tensor = TestTensor { name: "w".into(), dtype, shape: shape.to_vec(), data };
        write(folder, SINGLE_FILE, &file_bytes(Some("pt"), &[tensor]));
        Checkpoint::open(folder).unwrap()
    }

    fn entry(checkpoint: &Checkpoint) -> &TensorEntry {
        checkpoint.entry("w").unwrap()
    }

    #[test]
    fn the_fewest_zeros_of_every_group_are_found_along_rows() {
        // Rows of 12: groups of 2 and 4 exist, of 8 and more do not. Every four hold two zeros, but the last hold three.
        let row = [0., 1., 0., 2., 3., 0., 4., 0., 0., 0., 5., 0.];
        let values: Vec<f32> = row.iter().chain(&row).copied().collect();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let place = folder();
            let checkpoint = checkpoint(place.path(), dtype, [2, 12], &values);
            let scan = scan_tensor(&checkpoint, entry(&checkpoint), None).unwrap();
            assert_eq!((scan.zeros, scan.non_finite), (14, 0), "{dtype}");
            assert_eq!(scan.fewest_zeros, [Some(1), Some(2), None, None, None]);
            assert_eq!(scan.compared, None);
        }
    }

    #[test]
    fn zeros_in_groups_equal_a_count_one_by_one() {
        for word in [0, 1, u32::MAX, 0x8000_0001, 0x6a5c_9013, 0xf0f0_0ff1] {
            for (counts, m) in zeros_in_groups(word).into_iter().zip(GROUP_SIZES) {
                let group = u32::MAX >> (BLOCK - m);
                for first in (0..BLOCK).step_by(m) {
                    let plain = (first..first + m).filter(|bit| word >> bit & 1 == 1);
                    assert_eq!(
                        (counts >> first & group) as usize,
                        plain.count(),
                        "{word:x} {first} of {m}"
                    );
                }
            }
        }
    }

    #[test]
    fn pieces_add_up_to_the_tensor() {
        // Three pieces of 65536 f32 elements and a rest. The last block holds 15 zeros, every earlier block 16.
        let (rows, columns) = (205, 1024);
        let mut values: Vec<f32> = (0..rows * columns).map(|at| (at % 2) as f32).collect();
        let last = rows * columns - 2;
        values[last] = 1.0;
        values[5] = f32::INFINITY;
        values[7] = f32::NAN;
        let place = folder();
        let checkpoint = checkpoint(place.path(), Dtype::F32, [rows, columns], &values);
        assert!(entry(&checkpoint).bytes > 3 * PIECE_BYTES);
        let scan = scan_tensor(&checkpoint, entry(&checkpoint), None).unwrap();
        assert_eq!(scan.zeros, (rows * columns / 2 - 1) as u64);
        assert_eq!(scan.non_finite, 2);
        assert_eq!(scan.fewest_zeros, [Some(0), Some(1), Some(3), Some(7), Some(15)]);
    }

    #[test]
    fn the_first_change_is_the_first_of_the_tensor_on_any_number_of_threads() {
        let (rows, columns) = (205, 1024);
        let dense = vec![2.0f32; rows * columns];
        let mut pruned = dense.clone();
        pruned[3] = 0.0;
        pruned[70_000] = 7.0;
        pruned[200_000] = -0.0;
        let (one, other) = (folder(), folder());
        let dense = checkpoint(one.path(), Dtype::BF16, [rows, columns], &dense);
        let pruned = checkpoint(other.path(), Dtype::BF16, [rows, columns], &pruned);
        let scan = scan_tensor(&pruned, entry(&pruned), Some((&dense, entry(&dense)))).unwrap();
        let compared = scan.compared.unwrap();
        assert!(!compared.is_identical);
        assert_eq!((scan.zeros, compared.zeros_before, compared.changed), (2, 0, 2));
        let first = compared.first_changed.unwrap();
        assert_eq!((first.row, first.column), (70_000 / columns, 70_000 % columns));
        assert_eq!((first.before, first.now), (2.0, 7.0));
    }

    #[test]
    fn another_shape_or_dtype_is_not_compared() {
        let (one, other) = (folder(), folder());
        let wide = checkpoint(one.path(), Dtype::F32, [1, 4], &[1.0; 4]);
        let tall = checkpoint(other.path(), Dtype::F32, [4, 1], &[1.0; 4]);
        let error = scan_tensor(&wide, entry(&wide), Some((&tall, entry(&tall)))).unwrap_err();
        assert!(error.to_string().contains("[1, 4] here"), "{error}");
    }
}
