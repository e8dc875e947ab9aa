//! Products of rows with the input, on one thread: the loops over [`Vectors`], and the choice of the instructions.

#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "calls of functions that are compiled for instructions the CPU has, and prefetches"
    )
)]

use std::sync::OnceLock;

use half::{bf16, f16};

use super::super::compact::{Codes, CompactPart, KeptValues};
use super::super::int8::wide_scale;
use super::super::product::Values;
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::{self, Avx512};
use super::input::{Input, InputForm, InputGroup};
use super::vectors::{CODES, CodeFactors, GROUP, Portable, Step, Vectors};

/// Bytes between the weights that are multiplied and the weights that are asked for.
const AHEAD: usize = 2 << 10;
/// The same for masks, which are read 8 to 32 times as slowly.
const MASKS_AHEAD: usize = 512;
const LINE: usize = 64;

/// Rows of a weight.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// `[rows, columns]` as stored.
    Dense(Values<'a>),
    /// Rows of a compact matrix.
    Kept(PartRows<'a>),
}

/// Rows of a part of a compact matrix, from the row `first` of the part on.
#[derive(Clone, Copy)]
pub(super) struct PartRows<'a> {
    pub part: &'a CompactPart,
    pub first: usize,
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

/// Asks for the cache line at a distance behind a reference. The address need not exist.
#[inline(always)]
pub(in super::super) fn ask_for<T: ?Sized>(from: &T, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address reads nothing.
    unsafe {
        let at = std::ptr::from_ref(from).cast::<u8>().wrapping_add(bytes);
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}

#[inline(always)]
fn dense<V: Step<E, X>, E: Copy + Default, X>(
    v: V,
    values: &[E],
    columns: usize,
    x: &[InputGroup<X>],
    out: &mut [f32],
) {
    assert_eq!(x.len(), columns.div_ceil(GROUP), "the input has another form");
    let asks = asks_for_dense();
    for (y, row) in out.iter_mut().zip(values.chunks_exact(columns)) {
        let (groups, rest) = row.as_chunks::<GROUP>();
        let mut sums = v.zero();
        for (weights, x) in groups.iter().zip(x) {
            if asks {
                (0..size_of_val(weights)).step_by(LINE).for_each(|at| ask_for(weights, AHEAD + at));
            }
            sums = v.dense(sums, weights, &x.0);
        }
        if let (false, Some(x)) = (rest.is_empty(), x.get(groups.len())) {
            let mut last = [E::default(); GROUP];
            last[..rest.len()].copy_from_slice(rest);
            sums = v.dense(sums, &last, &x.0);
        }
        *y = v.total(sums);
    }
}

/// Software prefetches of dense rows make Intel's CPUs 15 % faster (Cascade Lake), and AMD's 10 to 20 % slower (Zen 4).
fn asks_for_dense() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // A virtual machine leaves its guest for this instruction, which takes as long as some rows.
        static IS_INTEL: OnceLock<bool> = OnceLock::new();
        *IS_INTEL.get_or_init(|| {
            // "GenuineIntel", in the order of the registers.
            let of = std::arch::x86_64::__cpuid(0);
            [of.ebx, of.edx, of.ecx] == [0x756e_6547, 0x4965_6e69, 0x6c65_746e]
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[inline(always)]
fn kept<V: Step<E, X>, E, X>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    values: &[E],
    x: &[InputGroup<X>],
    out: &mut [f32],
) {
    for (y, row) in out.iter_mut().zip(first..) {
        let mut at = part.start(row);
        let mut sums = v.zero();
        let mask = part.mask(row);
        assert_eq!(x.len(), mask.len(), "the input has another form");
        for (kept, x) in mask.iter().zip(x) {
            let window = window::<E, GROUP>(values, at);
            ask_for(kept, MASKS_AHEAD);
            (0..size_of_val(window))
                .step_by(2 * LINE)
                .for_each(|line| ask_for(window, AHEAD + line));
            sums = v.kept(sums, window, *kept, &x.0);
            at += kept.count_ones() as usize;
        }
        *y = v.total(sums);
    }
}

/// Products of 8-bit codes with activations in f32. With `ALL` the masks are constant, so that nothing is expanded; behind the last column
/// the activations are zeros.
#[inline(always)]
fn codes_by_floats<V: Step<i8, f32>, const ALL: bool>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    codes: &Codes,
    x: &[InputGroup<f32>],
    out: &mut [f32],
) {
    for (y, row) in out.iter_mut().zip(first..) {
        let mut at = part.start(row);
        let mut sums = v.zero();
        let blocks = part.mask(row).chunks(2).zip(x.chunks(2));
        for ((kept, x), scale) in blocks.zip(codes.scales_of(row)) {
            let mut block = v.zero();
            ask_for(&codes.values[at], AHEAD);
            for (kept, x) in kept.iter().zip(x) {
                let kept = if ALL { u64::MAX } else { *kept };
                block = v.kept(block, window(&codes.values, at), kept, &x.0);
                at += kept.count_ones() as usize;
            }
            sums = v.plus_scaled(sums, block, wide_scale(*scale));
        }
        *y = v.total(sums);
    }
}

/// Products of 8-bit codes with activations as 8-bit codes. `ALL` as for [`codes_by_floats`].
#[inline(always)]
fn codes_by_codes<V: Vectors, const ALL: bool>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    codes: &Codes,
    input: &Input,
    out: &mut [f32],
) {
    for (y, row) in out.iter_mut().zip(first..) {
        let mut at = part.start(row);
        let mut sums = v.zero();
        let blocks = part.mask(row).chunks(2).zip(input.codes());
        for ((kept, (x, x_scale)), scale) in blocks.zip(codes.scales_of(row)) {
            let window = window::<i8, CODES>(&codes.values, at);
            ask_for(kept, MASKS_AHEAD);
            ask_for(window, AHEAD);
            let kept = match ALL {
                true => [u64::MAX; 2],
                false => [kept[0], kept.get(1).copied().unwrap_or(0)],
            };
            let scale = wide_scale(*scale) * x_scale;
            sums = v.plus_codes(sums, kept, CodeFactors { codes: window, x, scale });
            at += (kept[0].count_ones() + kept[1].count_ones()) as usize;
        }
        *y = v.total(sums);
    }
}

/// The values from `at` on. Parts end with values that are not used, so that the last row has a window.
#[inline(always)]
fn window<E, const N: usize>(values: &[E], at: usize) -> &[E; N] {
    values[at..].first_chunk().expect("a part ends with a window of unused values")
}
