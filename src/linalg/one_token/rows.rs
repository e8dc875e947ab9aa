//! Products of rows with the input, on one thread: the choice of the instructions, and the loop over dense rows.

#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "calls of functions that are compiled for instructions the CPU has"
    )
)]

use std::sync::OnceLock;

use half::{bf16, f16};

use super::super::compact::KeptValues;
use super::super::product::Values;
use super::ahead::{LINE, ask_for, asks_for_dense, rows_together};
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::{self, Avx512};
use super::input::{Input, InputForm, InputGroup};
use super::kept::{PartRows, codes_by_codes, codes_by_floats, kept};
use super::vectors::{GROUP, Portable, Step};

/// Bytes between the weights that are multiplied and the weights that are asked for.
const AHEAD: usize = 2 << 10;

/// Rows of a weight.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// `[rows, columns]` as stored.
    Dense(Values<'a>),
    /// Rows of a compact matrix.
    Kept(PartRows<'a>),
}

/// Rows, the input, and the memory for a product per row.
pub(super) struct RowTask<'a> {
    pub rows: Rows<'a>,
    pub columns: usize,
    pub input: &'a Input,
    pub form: InputForm,
    pub out: &'a mut [f32],
}

/// The set of this process.
static CHOSEN: OnceLock<Instructions> = OnceLock::new();

/// A set of instructions.
#[derive(Clone, Copy)]
pub(super) enum Instructions {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<avx512::Base>),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512<avx512::Vnni>),
    #[cfg(target_arch = "x86_64")]
    Avx512Pairs(Avx512<avx512::Bf16Pairs>),
}

impl Instructions {
    /// All sets that this CPU has, the best first.
    pub(super) fn all() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let base = Avx512::detect();
            let vnni = base.and_then(Avx512::with_vnni);
            sets.extend(vnni.and_then(Avx512::with_pairs).map(Self::Avx512Pairs));
            sets.extend(vnni.map(Self::Avx512Vnni));
            sets.extend(base.map(Self::Avx512));
            sets.extend(Avx2::detect().map(Self::Avx2));
        }
        sets.push(Self::Portable(Portable));
        sets
    }

    /// The best set of this CPU, unless [`Instructions::choose`] was called before.
    pub(super) fn best() -> Self {
        *CHOSEN.get_or_init(|| Self::all().first().copied().unwrap_or(Self::Portable(Portable)))
    }

    /// Takes the set of this name from now on. Returns false where the CPU lacks it, or another set was taken before.
    pub(super) fn choose(name: &str) -> bool {
        let set = Self::all().into_iter().find(|set| set.name() == name);
        set.is_some_and(|set| CHOSEN.set(set).is_ok())
    }

    fn name(self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Pairs(_) => "avx512-vbmi2-bf16",
        }
    }

    /// Returns whether the set multiplies bf16 pairs.
    pub(super) fn has_pairs(self) -> bool {
        self.form_of_bf16(true) == InputForm::Pairs
    }

    /// The form of the input for bf16 weights.
    ///
    /// # Arguments
    /// * `rounds`: factors are rounded to bf16 where the set multiplies pairs
    pub(super) fn form_of_bf16(self, rounds: bool) -> InputForm {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Pairs(_) if rounds => InputForm::Pairs,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => InputForm::Parted,
            _ => InputForm::Wide,
        }
    }

    /// Writes the products of a task.
    ///
    /// # Panics
    /// Panics when the rows do not have the task's columns, and for a form of input that the set does not multiply.
    pub(super) fn multiply(self, task: RowTask<'_>) {
        match self {
            Self::Portable(portable) => multiply_either(portable, task),
            // SAFETY: the value exists, so the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(avx2) => unsafe { on_avx2(avx2, task) },
            // SAFETY: the value exists, so the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(base) => unsafe { on_avx512(base, task) },
            // SAFETY: the value exists, so the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(vnni) => unsafe { on_avx512_vnni(vnni, task) },
            // SAFETY: the value exists, so the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Pairs(pairs) => unsafe { on_avx512_pairs(pairs, task) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,popcnt,bmi2")]
fn on_avx2(avx2: Avx2, task: RowTask<'_>) {
    multiply(avx2, task.input.parted(), task);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,popcnt,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
fn on_avx512(base: Avx512<avx512::Base>, task: RowTask<'_>) {
    multiply(base, task.input.wide(), task);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,popcnt,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni")]
fn on_avx512_vnni(vnni: Avx512<avx512::Vnni>, task: RowTask<'_>) {
    multiply(vnni, task.input.wide(), task);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,popcnt,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512bf16,avx512vbmi2,avx512vnni")]
fn on_avx512_pairs(pairs: Avx512<avx512::Bf16Pairs>, task: RowTask<'_>) {
    multiply_either(pairs, task);
}

/// [`multiply`] on a set that multiplies bf16 with bf16, too.
#[inline(always)]
fn multiply_either<V>(v: V, task: RowTask<'_>)
where
    V: Step<f32, f32> + Step<f16, f32> + Step<bf16, f32> + Step<i8, f32> + Step<bf16, bf16>,
{
    match task.form {
        InputForm::Pairs => multiply(v, task.input.pairs(), task),
        _ => multiply(v, task.input.wide(), task),
    }
}

/// Products in f32, and of 8-bit codes; products of bf16 weights with activations in `X`.
#[inline(always)]
fn multiply<V, X>(v: V, of_bf16: &[InputGroup<X>], task: RowTask<'_>)
where
    V: Step<f32, f32> + Step<f16, f32> + Step<bf16, X> + Step<i8, f32>,
{
    let RowTask { rows, columns, input, form, out } = task;
    let x = input.wide();
    match rows {
        Rows::Dense(Values::F32(values)) => dense(v, values, columns, x, out),
        Rows::Dense(Values::F16(values)) => dense(v, values, columns, x, out),
        Rows::Dense(Values::Bf16(values)) => dense(v, values, columns, of_bf16, out),
        Rows::Kept(rows) => match rows.part.values() {
            KeptValues::F32(values) => kept(v, rows, values, x, out),
            KeptValues::F16(values) => kept(v, rows, values, x, out),
            KeptValues::Bf16(values) => kept(v, rows, values, of_bf16, out),
            KeptValues::Codes(codes) => match (form, rows.part.keeps_all()) {
                (InputForm::Codes, false) => codes_by_codes::<V, false>(v, rows, codes, input, out),
                (InputForm::Codes, true) => codes_by_codes::<V, true>(v, rows, codes, input, out),
                (_, false) => codes_by_floats::<V, false>(v, rows, codes, x, out),
                (_, true) => codes_by_floats::<V, true>(v, rows, codes, x, out),
            },
        },
    }
}

/// Dense rows, as many at once as [`rows_together`] says.
#[inline(always)]
fn dense<V: Step<E, X>, E: Copy + Default, X>(
    v: V,
    values: &[E],
    columns: usize,
    x: &[InputGroup<X>],
    out: &mut [f32],
) {
    assert_eq!(x.len(), columns.div_ceil(GROUP), "the input has another form");
    let rows = rows_together(x, V::ROWS);
    let whole = out.len() / rows * rows;
    let (values, last) = values.split_at(whole * columns);
    let (out, last_out) = out.split_at_mut(whole);
    // Calls by name, which are compiled for the instructions of their caller.
    match rows {
        4 => dense_rows::<V, E, X, 4, false>(v, values, columns, x, out),
        2 => dense_rows::<V, E, X, 2, false>(v, values, columns, x, out),
        _ if asks_for_dense() => dense_rows::<V, E, X, 1, true>(v, values, columns, x, out),
        _ => dense_rows::<V, E, X, 1, false>(v, values, columns, x, out),
    }
    if !last_out.is_empty() {
        dense_rows::<V, E, X, 1, false>(v, last, columns, x, last_out);
    }
}

/// [`dense`] for a multiple of `N` rows, with software prefetches if `ASKS`.
#[inline(always)]
fn dense_rows<V: Step<E, X>, E: Copy + Default, X, const N: usize, const ASKS: bool>(
    v: V,
    values: &[E],
    columns: usize,
    x: &[InputGroup<X>],
    out: &mut [f32],
) {
    let rows = values.chunks_exact(N * columns);
    for (out, rows) in out.as_chunks_mut::<N>().0.iter_mut().zip(rows) {
        let rows: [(&[[E; GROUP]], &[E]); N] =
            std::array::from_fn(|row| rows[row * columns..][..columns].as_chunks());
        let groups = columns / GROUP;
        let (whole, last) = x.split_at(groups);
        let mut sums = [v.zero(); N];
        for (group, x) in whole.iter().enumerate() {
            for (sums, (row, _)) in sums.iter_mut().zip(&rows) {
                let weights = &row[group];
                if ASKS {
                    (0..size_of_val(weights))
                        .step_by(LINE)
                        .for_each(|at| ask_for(weights, AHEAD + at));
                }
                *sums = v.dense(*sums, weights, &x.0);
            }
        }
        for ((y, mut sums), (_, rest)) in out.iter_mut().zip(sums).zip(rows) {
            if let [x] = last {
                let mut weights = [E::default(); GROUP];
                weights[..rest.len()].copy_from_slice(rest);
                sums = v.dense(sums, &weights, &x.0);
            }
            *y = v.total(sums);
        }
    }
}
