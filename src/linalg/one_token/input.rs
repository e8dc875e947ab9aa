//! The input of a product of one token, in the forms that rows multiply: whole groups of columns, with zeros behind the last column.

use half::bf16;
use rayon::prelude::*;

use super::super::buffer_pool::grow;
use super::super::int8::{code_of, largest};
use super::vectors::{CODES, CodedInput, GROUP, Parted, SHIFT};

/// The form of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum InputForm {
    /// f32.
    Wide,
    /// f32, the even and the odd columns of each 32 apart.
    Parted,
    /// Rounded to bf16.
    Pairs,
    /// Rounded to 8-bit codes with a scale for every 128 columns, max |x| / 127.
    Codes,
}

/// The elements of a group, on cache lines of their own.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct InputGroup<X>(pub [X; GROUP]);

/// An input in one or more forms. The memory is kept for the next input.
#[derive(Debug, Default)]
pub(in super::super) struct Input {
    wide: Vec<InputGroup<f32>>,
    parted: Vec<InputGroup<Parted>>,
    pairs: Vec<InputGroup<bf16>>,
    codes: Vec<CodedInput>,
    /// The scale of each block of codes.
    scales: Vec<f32>,
    /// Many tokens, rounded to codes and restored.
    rounded: Vec<f32>,
}

impl Input {
    /// Takes another input. Forms that are not asked for are empty.
    pub(in super::super) fn set(&mut self, x: &[f32], has: impl Fn(InputForm) -> bool) {
        self.wide.clear();
        self.parted.clear();
        self.pairs.clear();
        self.codes.clear();
        self.scales.clear();
        if has(InputForm::Wide) {
            self.wide.extend(x.chunks(GROUP).map(|x| group(x, |x| x)));
        }
        if has(InputForm::Parted) {
            self.parted.extend(x.chunks(GROUP).map(parted));
        }
        if has(InputForm::Pairs) {
            self.pairs.extend(x.chunks(GROUP).map(|x| group(x, bf16::from_f32)));
        }
        if has(InputForm::Codes) {
            for (codes, scale) in x.chunks(CODES).map(coded) {
                self.codes.push(codes);
                self.scales.push(scale);
            }
        }
    }

    /// Takes many tokens `[tokens, inner]`, rounded as a token is for products with codes: code · scale, in f32.
    pub(in super::super) fn round(&mut self, x: &[f32], inner: usize) {
        let rounded = grow(&mut self.rounded, x.len());
        let rows = rounded.par_chunks_mut(inner.max(1)).zip(x.par_chunks(inner.max(1)));
        rows.for_each(|(out, x)| {
            for (out, x) in out.chunks_mut(CODES).zip(x.chunks(CODES)) {
                let (inverse, scale) = code_scale(x);
                out.iter_mut()
                    .zip(x)
                    .for_each(|(out, x)| *out = f32::from(code_of(x * inverse)) * scale);
            }
        });
        self.rounded.truncate(x.len());
    }

    /// The tokens of [`Input::round`].
    pub(in super::super) fn rounded(&self) -> &[f32] {
        &self.rounded
    }

    pub(super) fn wide(&self) -> &[InputGroup<f32>] {
        &self.wide
    }

    pub(super) fn parted(&self) -> &[InputGroup<Parted>] {
        &self.parted
    }

    pub(super) fn pairs(&self) -> &[InputGroup<bf16>] {
        &self.pairs
    }

    /// The blocks of codes, and their scales.
    pub(super) fn codes(&self) -> (&[CodedInput], &[f32]) {
        (&self.codes, &self.scales)
    }
}

fn group<X: Copy + Default>(x: &[f32], of: impl Fn(f32) -> X) -> InputGroup<X> {
    let mut group = InputGroup([X::default(); GROUP]);
    group.0.iter_mut().zip(x).for_each(|(out, x)| *out = of(*x));
    group
}

fn parted(x: &[f32]) -> InputGroup<Parted> {
    let mut group = InputGroup([Parted::default(); GROUP]);
    for (column, x) in x.iter().enumerate() {
        group.0[column / 32 * 32 + column % 2 * 16 + column % 32 / 2] = Parted(*x);
    }
    group
}

/// The inverse of a block's scale, and the scale. Of a block with an infinite number or NaN, the scale is NaN, and so is the product.
fn code_scale(x: &[f32]) -> (f32, f32) {
    let largest = largest(x);
    match largest {
        _ if !largest.is_finite() => (0.0, f32::NAN),
        // A small largest number would have an infinite inverse.
        _ if largest < f32::MIN_POSITIVE * 128.0 => (0.0, largest / 127.0),
        _ => (127.0 / largest, largest / 127.0),
    }
}

/// The codes of a block and their scale.
fn coded(x: &[f32]) -> (CodedInput, f32) {
    let (inverse, scale) = code_scale(x);
    let mut coded = CodedInput { codes: [0; CODES], shifted: [0; CODES] };
    for (code, x) in coded.codes.iter_mut().zip(x) {
        // The code of a number that is not finite has no meaning: its block has a scale of NaN.
        *code = code_of(x * inverse);
    }
    for (shifted, code) in coded.shifted.iter_mut().zip(coded.codes) {
        *shifted = code.cast_unsigned() ^ SHIFT;
    }
    (coded, scale)
}
