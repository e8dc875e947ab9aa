//! The product of one token: y = W·x on the stored weight, at the speed of memory.
//!
//! y_i = Σ_j W_ij x_j, W `[rows, columns]` as stored or compact, y in f32, accumulated in f32. Each weight is used once, so reading W limits
//! the speed. Products of many tokens pack rows first, which here would write and read more bytes than the weight has.
//!
//! A row's sum does not depend on the number of threads or on the rows around it. Its order of sums differs from the order of products
//! of many tokens, and depends on the width of the CPU's vectors. A compact weight gives the bits of the dense weight.
//!
//! | file | content |
//! | --- | --- |
//! | `input` | the input in the forms that rows multiply |
//! | `rows` | the choice of the instructions, and the loop over dense rows on one thread |
//! | `kept` | the loops over rows of compact weights |
//! | `ahead` | software prefetches, and the choice of rows that pass at once |
//! | `vectors` | sums of 64 columns at a time: the traits, and the implementation for any CPU |
//! | `avx2`, `avx512` | the implementations for x86 |

mod ahead;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod input;
mod kept;
mod rows;
#[cfg(test)]
mod tests;
mod vectors;

use rayon::prelude::*;

use super::compact::CompactMatrix;
use super::parts::TASK_BYTES;
use super::stored::{StoredDtype, StoredMatrix};
pub(super) use ahead::{LINE, ask_for};
pub(super) use input::{Input, InputForm};
use kept::PartRows;
use rows::{Instructions, RowTask, Rows};
pub(super) use vectors::StoredWeight;

/// Returns whether this CPU multiplies bf16 pairs in the products of one token.
pub fn has_pairs() -> bool {
    Instructions::best().has_pairs()
}

/// Takes a set of instructions for all products of one token: `portable`, `avx2`, `avx512`, `avx512-vnni` or `avx512-vbmi2-bf16`. For
/// measurements, and before the first product. Returns false where the CPU lacks the set.
pub fn choose_instructions(name: &str) -> bool {
    Instructions::choose(name)
}

/// Writes W·x to `out`, for an input that was set with the form of the weight.
///
/// # Panics
/// Panics when `out` does not have a value per row, or the input does not have W's columns.
pub(super) fn dense(weight: &StoredMatrix, input: &Input, form: InputForm, out: &mut [f32]) {
    dense_by(Instructions::best(), weight, input, form, out);
}

fn dense_by(
    instructions: Instructions,
    weight: &StoredMatrix,
    input: &Input,
    form: InputForm,
    out: &mut [f32],
) {
    assert_eq!(out.len(), weight.rows(), "out must be [rows]");
    let columns = weight.columns();
    if columns == 0 {
        return out.fill(0.0);
    }
    let rows_at_once = (TASK_BYTES / (columns * weight.dtype().bytes())).max(1);
    let task = |(number, out): (usize, &mut [f32])| {
        let first = number * rows_at_once;
        let rows = Rows::Dense(weight.values_of(first..first + out.len()));
        instructions.multiply(RowTask { rows, columns, input, form, out });
    };
    if out.len() <= rows_at_once {
        task((0, out));
    } else {
        out.par_chunks_mut(rows_at_once).enumerate().for_each(task);
    }
}

/// [`dense`] for a compact weight. Tasks have about as many kept values each.
///
/// # Panics
/// Panics as [`dense`].
pub(super) fn compact(weight: &CompactMatrix, input: &Input, form: InputForm, out: &mut [f32]) {
    compact_by(Instructions::best(), weight, input, form, out);
}

fn compact_by(
    instructions: Instructions,
    weight: &CompactMatrix,
    input: &Input,
    form: InputForm,
    out: &mut [f32],
) {
    assert_eq!(out.len(), weight.rows(), "out must be [rows]");
    let columns = weight.columns();
    let mut rest = out;
    let mut tasks = Vec::with_capacity(weight.tasks().len());
    for (part, rows) in weight.tasks() {
        let (out, behind) = rest.split_at_mut(rows.len());
        rest = behind;
        tasks.push(RowTask {
            rows: Rows::Kept(PartRows { part, first: rows.start }),
            columns,
            input,
            form,
            out,
        });
    }
    match tasks.len() {
        0 | 1 => tasks.into_iter().for_each(|task| instructions.multiply(task)),
        _ => tasks.into_par_iter().for_each(|task| instructions.multiply(task)),
    }
}

/// The form of the input for a dense weight.
///
/// # Arguments
/// * `rounds`: factors are rounded to bf16 where the CPU multiplies pairs
pub(super) fn form_of(dtype: StoredDtype, rounds: bool) -> InputForm {
    match dtype {
        StoredDtype::Bf16 => Instructions::best().form_of_bf16(rounds),
        StoredDtype::F32 | StoredDtype::F16 => InputForm::Wide,
    }
}
