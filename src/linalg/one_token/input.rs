//! The input of a product of one token, in the forms that rows multiply: whole groups of columns, with zeros behind the last column.

use half::bf16;

use super::super::int8::largest;
use super::vectors::{CODES, CodedInput, GROUP};

/// The form of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum InputForm {
    /// f32.
    Wide,
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
    pairs: Vec<InputGroup<bf16>>,
    codes: Vec<(CodedInput, f32)>,
}

impl Input {
    /// Takes another input. Forms that are not asked for are empty.
    pub(in super::super) fn set(&mut self, x: &[f32], has: impl Fn(InputForm) -> bool) {
        self.wide.clear();
        self.pairs.clear();
        self.codes.clear();
        if has(InputForm::Wide) {
            self.wide.extend(x.chunks(GROUP).map(|x| group(x, |x| x)));
        }
        if has(InputForm::Pairs) {
            self.pairs.extend(x.chunks(GROUP).map(|x| group(x, bf16::from_f32)));
        }
        if has(InputForm::Codes) {
            self.codes.extend(x.chunks(CODES).map(coded));
        }
    }

    pub(super) fn wide(&self) -> &[InputGroup<f32>] {
        &self.wide
    }

    pub(super) fn pairs(&self) -> &[InputGroup<bf16>] {
        &self.pairs
    }

    pub(super) fn codes(&self) -> impl Iterator<Item = (&CodedInput, f32)> {
        self.codes.iter().map(|(codes, scale)| (codes, *scale))
    }
}

fn group<X: Copy + Default>(x: &[f32], of: impl Fn(f32) -> X) -> InputGroup<X> {
    let mut group = InputGroup([X::default(); GROUP]);
    group.0.iter_mut().zip(x).for_each(|(out, x)| *out = of(*x));
    group
}

/// The codes of a block and their scale. Of a block with an infinite number or NaN, the scale is NaN, and so is the product.
fn coded(x: &[f32]) -> (CodedInput, f32) {
    let largest = largest(x);
    let mut coded = CodedInput { codes: [0; CODES], words: [[0; 2]; CODES] };
    if !largest.is_finite() {
        return (coded, f32::NAN);
    }
    // A largest number near the end of the range of f32 would have an infinite inverse.
    let inverse = if largest < f32::MIN_POSITIVE * 128.0 { 0.0 } else { 127.0 / largest };
    for ((code, word), x) in coded.codes.iter_mut().zip(&mut coded.words).zip(x) {
        *code = (x * inverse).round_ties_even() as i8;
        *word = [(*code).into(), 0];
    }
    (coded, largest / 127.0)
}
