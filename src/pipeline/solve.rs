//! The pruning of a matrix whose rows the ranks share.
//!
//! ```text
//! rank r of R    copies its rows of W, solves them, and sends them with their mask bits to all other ranks
//! a search among all weights    integer counts, added over the ranks
//! ```
//!
//! Methods that only score are quicker on every rank than over the network. So is a matrix with few rows. Ranks get whole groups of
//! eight rows, whose mask bits fill whole bytes. Bytes that a rank sends for W of w bytes and n elements: (w + n/8)/R · (R − 1), and for each
//! search 4 · 2¹⁶ · (R − 1)/R or a little more (two reads; a count takes one or two bytes).

use std::ops::Range;

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::linalg::{StoredDtype, StoredMatrix};
use crate::pruning::rows::{OwnRows, RowSolvers};
use crate::pruning::{Mask, Request, Technique};
use crate::ranks::Ranks;
use crate::ranks::arrays::owned;

/// Rows whose mask bits fill whole bytes, whatever their length.
const GROUP: usize = 8;

/// Bytes of a search that a rank sends, but for the factor (R − 1)/R.
const SEARCH_BYTES: f64 = (4 << 16) as f64;

/// Ranks that solve the rows of a matrix together.
struct RankSolvers<'a>(&'a Ranks);

impl RowSolvers for RankSolvers<'_> {
    fn count(&self) -> usize {
        self.0.size()
    }

    fn place(&self) -> usize {
        self.0.rank()
    }

    fn sum(&self, numbers: &mut [u64]) -> Result<()> {
        self.0.sum(numbers)
    }
}

/// The rows of a matrix that a rank solves.
fn rows_of(rows: usize, rank: usize, ranks: usize) -> Range<usize> {
    let groups = owned(rows.div_ceil(GROUP), rank, ranks);
    rows.min(groups.start * GROUP)..rows.min(groups.end * GROUP)
}

/// Returns whether ranks share the rows of a matrix with so many rows.
fn is_shared(technique: &Technique, rows: usize, ranks: usize) -> bool {
    ranks > 1 && technique.shares_rows() && rows >= GROUP * ranks
}

/// The rows of a matrix that a rank with the most rows solves.
fn most_rows(technique: &Technique, rows: usize, ranks: usize) -> usize {
    match is_shared(technique, rows, ranks) {
        true => rows.min(rows.div_ceil(GROUP).div_ceil(ranks) * GROUP),
        false => rows,
    }
}

/// The operations of a matrix `[out_features, in_features]` that a rank performs: of its rows, and of what all rows need.
pub(super) fn operations(technique: &Technique, [out, inner]: [usize; 2], ranks: usize) -> f64 {
    technique.operations(most_rows(technique, out, ranks), inner)
}

/// Bytes of the pruning of a matrix `[out_features, in_features]`, beyond the mask, a few numbers per column and two rows per thread.
pub(super) fn working_bytes(
    technique: &Technique,
    [out, inner]: [usize; 2],
    dtype: StoredDtype,
    ranks: usize,
) -> ByteSize {
    let own = most_rows(technique, out, ranks);
    let copied = match is_shared(technique, out, ranks) {
        true => ByteSize::of(own.saturating_mul(inner), dtype.bytes()),
        false => ByteSize::ZERO,
    };
    // What was solved arrives in pieces when the memory of the solver is free.
    technique.working_bytes(own, inner) + copied
}

/// Bytes that a rank sends for a matrix; the formula is in the first lines of this file.
pub(super) fn bytes_sent(
    technique: &Technique,
    (out, inner): (usize, usize),
    dtype: StoredDtype,
    ranks: usize,
) -> f64 {
    if !is_shared(technique, out, ranks) {
        return 0.0;
    }
    let solved = (out * inner) as f64 * (dtype.bytes() as f64 + 1.0 / 8.0);
    let searches = technique.searches(inner) as f64 * SEARCH_BYTES;
    (solved + searches) * (ranks - 1) as f64 / ranks as f64
}

/// Prunes a matrix. Every rank calls it with the same weight, and ends with the same weight and mask.
///
/// # Errors
/// Fails as [`Technique::prune`], and when a rank has left.
pub(super) fn prune(
    technique: &Technique,
    weight: &mut StoredMatrix,
    request: &Request<'_>,
    ranks: &Ranks,
) -> Result<Mask> {
    let (rows, columns) = (weight.rows(), weight.columns());
    if request.target.removes_nothing() || !is_shared(technique, rows, ranks.size()) {
        return technique.prune(weight, request);
    }
    let of = |rank: usize| rows_of(rows, rank, ranks.size());
    let bytes_of_row = weight.as_bytes().len() / rows;
    let bytes_of = |rank: usize| of(rank).start * bytes_of_row..of(rank).end * bytes_of_row;
    let bits_of = |rank: usize| {
        let bit = |row: usize| (row * columns).div_ceil(8);
        bit(of(rank).start)..bit(of(rank).end)
    };
    let rank = ranks.rank();
    let mut own = StoredMatrix::zeros(weight.dtype(), of(rank).len(), columns)?;
    own.as_bytes_mut().copy_from_slice(&weight.as_bytes()[bytes_of(rank)]);
    let solvers = RankSolvers(ranks);
    let shared = OwnRows { first: of(rank).start, all: rows, solvers: &solvers };
    let mask = technique.prune(&mut own, &Request { rows: Some(shared), ..*request })?;
    let whole = weight.as_bytes_mut();
    whole[bytes_of(rank)].copy_from_slice(own.as_bytes());
    drop(own);
    ranks.gather_parts(whole, &bytes_of)?;
    let mut bits = vec![0; (rows * columns).div_ceil(8)];
    bits[bits_of(rank)].copy_from_slice(mask.bits());
    ranks.gather_parts(&mut bits, &bits_of)?;
    Ok(Mask::from_bits(rows, columns, bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Products;
    use crate::pruning::statistics::Statistics;
    use crate::pruning::{METHODS, Pattern, PruningMethod, REFINEMENTS, Target};
    use crate::ranks::threads;

    const SHAPE: [usize; 2] = [75, 64];

    fn wave(at: usize) -> f32 {
        ((at * 7919 % 10_007) as f32 / 5000.0 - 1.0) * ((at % 13) as f32 + 0.5)
    }

    /// Weights with zeros and ties.
    fn weight(dtype: StoredDtype) -> StoredMatrix {
        let [rows, columns] = SHAPE;
        let value = |at: usize| match at % 11 {
            0 => 0.0,
            1 | 2 => 0.5,
            _ => wave(at),
        };
        let values: Vec<f32> = (0..rows * columns).map(value).collect();
        StoredMatrix::from_f32(dtype, rows, columns, &values)
    }

    fn statistics(technique: &Technique) -> Statistics {
        let columns = SHAPE[1];
        let kind = technique.statistics().expect("methods that solve calibrate");
        let mut statistics = kind.begin(columns, Products::F32);
        for sample in 0..4 {
            let rows: Vec<f32> =
                (0..40 * columns).map(|at| wave(at + 977 * sample) + 0.1).collect();
            match &mut statistics {
                Statistics::InPlace(statistics) => {
                    statistics.add_rows(&rows);
                    statistics.end_sample();
                }
                Statistics::Merged(_) => unreachable!("methods that solve sum up XᵀX"),
            }
            statistics.end_block();
        }
        statistics
    }

    fn techniques() -> Vec<Technique> {
        let of = |method: &&'static dyn PruningMethod| {
            let refined = REFINEMENTS.iter().map(|refinement| Some(*refinement));
            let all = std::iter::once(None).chain(refined);
            all.map(|refinement| Technique { refinement, ..Technique::of(*method) })
                .filter(|technique| technique.check().is_ok() && technique.shares_rows())
                .collect::<Vec<_>>()
        };
        METHODS.iter().flat_map(of).collect()
    }

    #[test]
    fn rows_that_ranks_share_have_the_bits_of_one_process() {
        let techniques = techniques();
        let names: Vec<String> = techniques.iter().map(Technique::name).collect();
        for name in ["sparsegpt", "alps", "ladder", "wanda+weights"] {
            assert!(names.contains(&name.to_string()), "{names:?}");
        }
        let targets = [
            Target { ratio: 0.6, pattern: Pattern::Unstructured },
            Target { ratio: 0.0, pattern: Pattern::Unstructured },
            Target { ratio: 0.5, pattern: Pattern::NOfM { n: 2, m: 4 } },
        ];
        for technique in &techniques {
            let statistics = statistics(technique);
            for (target, dtype) in
                targets.iter().zip([StoredDtype::F32, StoredDtype::F32, StoredDtype::Bf16])
            {
                let solved = |ranks: &Ranks| {
                    statistics.forget_derived();
                    let mut weight = weight(dtype);
                    let request = Request::new("w", Some(&statistics), *target);
                    let mask = prune(technique, &mut weight, &request, ranks)?;
                    anyhow::Ok((weight.as_bytes().to_vec(), mask.into_bits()))
                };
                let alone = solved(&Ranks::alone()).unwrap();
                // Eight ranks have more than eight rows each, ten have not.
                for size in [2, 3, 8, 10] {
                    let joined = threads::run(size, |ranks| {
                        let done = solved(ranks)?;
                        Ok((done, ranks.traffic().bytes_sent as f64))
                    });
                    let planned = bytes_sent(technique, (SHAPE[0], SHAPE[1]), dtype, size);
                    assert_eq!(planned > 0.0, size < 10);
                    for outcome in joined {
                        let (done, sent) = outcome.unwrap();
                        let name = technique.name();
                        assert!(done == alone, "{name}, {target:?} on {size}");
                        // A message has a length, and ranks have whole groups of rows.
                        assert!(sent <= 1.4 * planned + 1e4, "{name}: {sent}, planned {planned}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_error_names_the_row_of_the_matrix() {
        let technique = Technique::of(*METHODS.iter().find(|of| of.name() == "ladder").unwrap());
        let statistics = statistics(&technique);
        let target = Target { ratio: 0.5, pattern: Pattern::Unstructured };
        let outcomes = threads::run(2, |ranks| {
            let mut weight = weight(StoredDtype::F32);
            let at = (70 * SHAPE[1] + 3) * size_of::<f32>();
            weight.as_bytes_mut()[at..at + 4].copy_from_slice(&f32::NAN.to_ne_bytes());
            let request = Request::new("w", Some(&statistics), target);
            let done = prune(&technique, &mut weight, &request, ranks);
            if let Err(error) = &done {
                ranks.leave(Some(error.to_string()));
            }
            done
        });
        let errors: Vec<String> =
            outcomes.into_iter().map(|of| of.unwrap_err().to_string()).collect();
        assert!(errors[1].contains("row 70"), "{errors:?}");
    }
}
