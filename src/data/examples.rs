//! Training examples: token ids of equal length, and the tokens that loss counts on.
//!
//! An example is a row of `seqlen` tokens. A shorter example is padded at its end with its last token. Attention looks back only, so
//! no real token sees the padding, and no loss counts on it. The first token of an example follows no token, so it is never a target.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{PythonRandom, digest};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::TextProtocol;

/// Examples in a fixed order, and the record of their origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Examples {
    /// Token ids, [examples, seqlen] row-major.
    tokens: Vec<u32>,
    /// Loss counts on the prediction of the token, [examples, seqlen] row-major.
    is_target: Vec<bool>,
    /// Tokens of each example without the padding.
    lengths: Vec<usize>,
    seqlen: usize,
    protocol: TextProtocol,
}

/// The part of the examples that is held out, for a loss that training does not see.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeldOut {
    /// A number of examples.
    Count(usize),
    /// A share of all examples, rounded to a number of them.
    Share(f64),
}

impl Examples {
    /// Examples without padding, in which every token but the first is a target.
    ///
    /// # Arguments
    /// * `tokens`: `[examples, seqlen]` row-major
    ///
    /// # Errors
    /// Fails when there is no example, when `seqlen` is below 2, and when `tokens` does not have `examples · seqlen` elements.
    pub fn from_tokens(tokens: Vec<u32>, examples: usize, seqlen: usize) -> Result<Self> {
        check_seqlen(seqlen)?;
        if examples == 0 || examples.checked_mul(seqlen) != Some(tokens.len()) {
            return Err(Failure::new(format!(
                "{} tokens are not {examples} examples of {seqlen}",
                tokens.len()
            ))
            .into());
        }
        let mut is_target = vec![true; tokens.len()];
        for first in is_target.iter_mut().step_by(seqlen) {
            *first = false;
        }
        let all = Self {
            tokens,
            is_target,
            lengths: vec![seqlen; examples],
            seqlen,
            protocol: TextProtocol::default(),
        };
        Ok(all.recorded_as(TextProtocol {
            total_tokens: (examples * seqlen) as u64,
            ..TextProtocol::default()
        }))
    }

    /// The same examples with the record of their text, to which their number, length and hash are added.
    #[must_use]
    pub(super) fn recorded_as(self, text: TextProtocol) -> Self {
        let protocol = TextProtocol {
            tokens_used: self.tokens.len() as u64,
            windows: self.len() as u64,
            seqlen: self.seqlen as u64,
            tokens_sha256: digest::of_ids(&self.tokens),
            ..text
        };
        Self { protocol, ..self }
    }

    /// Number of examples, at least 1.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Always false; no constructor makes an empty list.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Tokens per example, with the padding.
    pub fn seqlen(&self) -> usize {
        self.seqlen
    }

    /// The tokens of an example, `[seqlen]`, with the padding.
    pub fn tokens_of(&self, example: usize) -> &[u32] {
        &self.tokens[example * self.seqlen..][..self.seqlen]
    }

    /// Number of tokens of an example, without the padding.
    pub fn length_of(&self, example: usize) -> usize {
        self.lengths[example]
    }

    /// The targets of an example, `[seqlen]`: at each position the token that follows, and `None` if no loss counts on it and at the
    /// last position.
    pub fn targets_of(&self, example: usize) -> Vec<Option<u32>> {
        let following = self.tokens_of(example).iter().zip(self.flags_of(example));
        let targets = following.map(|(token, is_target)| is_target.then_some(*token));
        targets.skip(1).chain([None]).collect()
    }

    /// Number of targets of an example, at least 1.
    pub fn predicted(&self, example: usize) -> usize {
        count(self.flags_of(example))
    }

    /// Number of targets of all examples.
    pub fn total_predicted(&self) -> usize {
        count(&self.is_target)
    }

    /// Number of tokens of all examples, without the padding.
    pub fn total_tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The record of the text and the ids. `windows` is the number of examples; `tokens_used` and the hash contain the padding.
    pub fn protocol(&self) -> &TextProtocol {
        &self.protocol
    }

    /// Memory of a number of examples, for the memory plan: 4 bytes and a flag per token, 8 bytes per example.
    pub fn bytes_of(examples: usize, seqlen: usize) -> ByteSize {
        let tokens = ByteSize::of(examples.saturating_mul(seqlen), 5);
        ByteSize(tokens.0.saturating_add(ByteSize::of(examples, 8).0))
    }

    /// Splits the examples into the examples to train on and the held-out examples, both in the order of the text.
    ///
    /// The held-out examples are the first of CPython's `random.Random(seed).shuffle(list(range(n)))`.
    ///
    /// # Errors
    /// Fails when a part has no example, and when a share is not between 0 and 1.
    pub fn split(mut self, held_out: HeldOut, seed: u64) -> Result<(Self, Self)> {
        let examples = self.len();
        let count = held_out.of(examples)?;
        let mut order: Vec<usize> = (0..examples).collect();
        PythonRandom::new(seed).shuffle(&mut order);
        let mut is_held = vec![false; examples];
        for example in &order[..count] {
            is_held[*example] = true;
        }
        let held = (0..examples).filter(|example| is_held[*example]);
        let mut other = Self {
            tokens: Vec::with_capacity(count * self.seqlen),
            is_target: Vec::with_capacity(count * self.seqlen),
            lengths: Vec::with_capacity(count),
            seqlen: self.seqlen,
            protocol: TextProtocol::default(),
        };
        for example in held {
            other.tokens.extend_from_slice(self.tokens_of(example));
            other.is_target.extend_from_slice(self.flags_of(example));
            other.lengths.push(self.lengths[example]);
        }
        self.keep(|example| !is_held[example]);
        let record = |part: &str| TextProtocol {
            convention: format!(
                "{}; {part} of {examples}, {count} held out by a draw",
                self.protocol.convention
            ),
            seed: Some(seed),
            ..self.protocol.clone()
        };
        let (kept, held) = (record("those to train on"), record("those held out"));
        Ok((self.recorded_as(kept), other.recorded_as(held)))
    }

    /// Keeps the examples that `is_kept` selects, in place.
    fn keep(&mut self, is_kept: impl Fn(usize) -> bool) {
        let seqlen = self.seqlen;
        let mut kept = 0;
        for example in (0..self.len()).filter(|example| is_kept(*example)) {
            let row = example * seqlen..(example + 1) * seqlen;
            self.tokens.copy_within(row.clone(), kept * seqlen);
            self.is_target.copy_within(row, kept * seqlen);
            self.lengths[kept] = self.lengths[example];
            kept += 1;
        }
        self.tokens.truncate(kept * seqlen);
        self.is_target.truncate(kept * seqlen);
        self.lengths.truncate(kept);
    }

    fn flags_of(&self, example: usize) -> &[bool] {
        &self.is_target[example * self.seqlen..][..self.seqlen]
    }
}

impl HeldOut {
    /// The number of examples to hold out of `examples`. Fails unless both sides have at least 1 example.
    fn of(self, examples: usize) -> Result<usize> {
        let (count, asked) = match self {
            Self::Count(count) => (count, format!("{count} examples")),
            Self::Share(share) if (0.0..=1.0).contains(&share) => {
                let count = (share * examples as f64).round() as usize;
                (count, format!("a share of {share} ({count} examples)"))
            }
            Self::Share(share) => {
                return Err(Failure::usage(format!(
                    "a share of {share} cannot be held out: it is not between 0 and 1"
                ))
                .hint("use a share like 0.05, or a number of examples")
                .into());
            }
        };
        if (1..examples).contains(&count) {
            return Ok(count);
        }
        let failure = Failure::new(format!(
            "{asked} of {examples} cannot be held out: at least one example is needed on each side"
        ));
        Err(match examples {
            0 | 1 => failure.hint("use a longer text, or a shorter --seqlen"),
            2.. => failure.hint(format!("hold out 1 to {} examples", examples - 1)),
        }
        .into())
    }
}

/// Refuses examples that are too short to have a token to predict.
pub(super) fn check_seqlen(seqlen: usize) -> Result<()> {
    if seqlen >= 2 {
        return Ok(());
    }
    Err(Failure::usage(format!("an example of {seqlen} tokens has no token to predict"))
        .hint("use --seqlen 1024, or another length of at least 2")
        .into())
}

fn count(flags: &[bool]) -> usize {
    flags.iter().filter(|is_target| **is_target).count()
}

/// Examples while they are made.
pub(super) struct ExampleBuilder {
    examples: Examples,
    at_most: usize,
    /// Examples without a target.
    pub(super) left_out: usize,
    /// Documents of more than `seqlen` tokens.
    pub(super) cut: usize,
}

impl ExampleBuilder {
    /// A list without examples, for rows of `seqlen` tokens.
    pub(super) fn new(seqlen: usize, at_most: Option<usize>) -> Self {
        Self {
            examples: Examples {
                tokens: Vec::new(),
                is_target: Vec::new(),
                lengths: Vec::new(),
                seqlen,
                protocol: TextProtocol::default(),
            },
            at_most: at_most.unwrap_or(usize::MAX),
            left_out: 0,
            cut: 0,
        }
    }

    /// Number of examples so far.
    pub(super) fn len(&self) -> usize {
        self.examples.len()
    }

    /// True if no more examples are taken.
    pub(super) fn is_full(&self) -> bool {
        self.len() >= self.at_most
    }

    /// Adds an example of any length, unless it has no target or the list is full. Tokens beyond `seqlen` are cut off.
    /// Fails when there is no memory.
    pub(super) fn push(&mut self, tokens: &[u32], is_target: &[bool]) -> Result<()> {
        if self.is_full() {
            return Ok(());
        }
        let seqlen = self.examples.seqlen;
        let length = tokens.len().min(seqlen);
        self.cut += usize::from(tokens.len() > seqlen);
        let flags = is_target.get(1..length).unwrap_or_default();
        let Some(last) = tokens.get(length.wrapping_sub(1)).filter(|_| flags.contains(&true))
        else {
            self.left_out += 1;
            return Ok(());
        };
        let Examples { tokens: all, is_target: all_flags, lengths, .. } = &mut self.examples;
        let is_room = all.try_reserve(seqlen).is_ok() && all_flags.try_reserve(seqlen).is_ok();
        if !is_room {
            let bytes = Examples::bytes_of(lengths.len() + 1, seqlen);
            return Err(Failure::new(format!(
                "no memory for {} examples of {seqlen} tokens: {bytes}",
                lengths.len() + 1
            ))
            .hint("use fewer examples or a shorter --seqlen")
            .into());
        }
        let rows = all.len() + seqlen;
        all.extend_from_slice(&tokens[..length]);
        all.resize(rows, *last);
        all_flags.push(false);
        all_flags.extend_from_slice(flags);
        all_flags.resize(rows, false);
        lengths.push(length);
        Ok(())
    }

    /// The examples, of which there may be none.
    pub(super) fn finish(mut self) -> Examples {
        self.examples.tokens.shrink_to_fit();
        self.examples.is_target.shrink_to_fit();
        self.examples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(seqlen: usize, rows: &[(&[u32], &[bool])]) -> (Examples, usize, usize) {
        let mut builder = ExampleBuilder::new(seqlen, None);
        for (tokens, flags) in rows {
            builder.push(tokens, flags).expect("memory");
        }
        let (left_out, cut) = (builder.left_out, builder.cut);
        (builder.finish(), left_out, cut)
    }

    #[test]
    fn a_target_is_the_next_token_if_loss_counts_on_it() {
        let examples = Examples::from_tokens(vec![5, 6, 7, 8, 9, 10], 2, 3).expect("examples");
        assert_eq!((examples.len(), examples.seqlen()), (2, 3));
        assert_eq!(examples.tokens_of(1), [8, 9, 10]);
        assert_eq!(examples.targets_of(1), [Some(9), Some(10), None]);
        assert_eq!((examples.predicted(1), examples.total_predicted()), (2, 4));
        assert_eq!((examples.length_of(0), examples.total_tokens()), (3, 6));
        let protocol = examples.protocol();
        assert_eq!((protocol.windows, protocol.seqlen, protocol.tokens_used), (2, 3, 6));
        assert_eq!(protocol.tokens_sha256, digest::of_ids(&[5, 6, 7, 8, 9, 10]));
        for (count, examples, seqlen) in [(6, 2, 2), (0, 0, 3), (3, 3, 1), (4, usize::MAX, 4)] {
            assert!(Examples::from_tokens(vec![1; count], examples, seqlen).is_err());
        }
    }

    #[test]
    fn short_examples_are_padded_long_ones_cut_and_those_without_a_target_left_out() {
        let (examples, left_out, cut) = built(
            4,
            &[
                (&[1, 2], &[true, true]),
                (&[1, 2, 3, 4, 5], &[false, false, true, false, true]),
                // No target: none at all, only the first token, only after the cut, a single token, no token.
                (&[1, 2, 3], &[false; 3]),
                (&[1, 2, 3], &[true, false, false]),
                (&[1, 2, 3, 4, 5], &[false, false, false, false, true]),
                (&[1], &[true]),
                (&[], &[]),
            ],
        );
        assert_eq!((examples.len(), left_out, cut), (2, 5, 2));
        assert_eq!(examples.tokens_of(0), [1, 2, 2, 2]);
        assert_eq!(examples.targets_of(0), [Some(2), None, None, None]);
        assert_eq!(examples.tokens_of(1), [1, 2, 3, 4]);
        assert_eq!(examples.targets_of(1), [None, Some(3), None, None]);
        assert_eq!([0, 1].map(|example| examples.predicted(example)), [1, 1]);
        assert_eq!([0, 1].map(|example| examples.length_of(example)), [2, 4]);
        assert_eq!(examples.total_tokens(), 6);
        // 2 · 4 tokens of 5 bytes and 2 · 8 bytes.
        assert_eq!(Examples::bytes_of(2, 4), ByteSize(56));
    }

    #[test]
    fn a_full_list_takes_no_more() {
        let mut builder = ExampleBuilder::new(2, Some(1));
        assert!(!builder.is_full());
        for token in 0..3 {
            builder.push(&[token, token], &[true, true]).expect("memory");
        }
        assert!(builder.is_full());
        assert_eq!(builder.finish().tokens, [0, 0]);
        let mut endless = ExampleBuilder::new(usize::MAX, None);
        let error = endless.push(&[1, 2], &[true, true]).expect_err("no memory");
        assert!(error.to_string().contains("no memory for 1 examples"), "{error}");
    }

    /// Ten examples of two tokens, both the number of the example.
    fn ten() -> Examples {
        let tokens = (0..10).flat_map(|n| [n, n]).collect();
        Examples::from_tokens(tokens, 10, 2).expect("examples")
    }

    fn firsts(examples: &Examples) -> Vec<u32> {
        (0..examples.len()).map(|n| examples.tokens_of(n)[0]).collect()
    }

    #[test]
    fn the_split_is_that_of_cpythons_shuffle_and_keeps_the_order() {
        // x = list(range(10)); random.Random(0).shuffle(x): 7, 8, 1, 5, …
        for held_out in [HeldOut::Count(3), HeldOut::Share(0.3)] {
            let (train, held) = ten().split(held_out, 0).expect("a split");
            assert_eq!(firsts(&train), [0, 2, 3, 4, 5, 6, 9]);
            assert_eq!(firsts(&held), [1, 7, 8]);
            assert_eq!(held.targets_of(2), [Some(8), None]);
            assert_eq!((train.protocol.windows, held.protocol.windows), (7, 3));
            assert_eq!(held.protocol.seed, Some(0));
            assert_eq!(held.protocol.tokens_sha256, digest::of_ids(&[1, 1, 7, 7, 8, 8]));
            assert_ne!(train.protocol.convention, held.protocol.convention);
        }
        // random.Random(42): 7, 3, …
        let (_, held) = ten().split(HeldOut::Count(2), 42).expect("a split");
        assert_eq!(firsts(&held), [3, 7]);
        let (train, held) = ten().split(HeldOut::Count(9), 0).expect("a split");
        assert_eq!((firsts(&train), held.len()), (vec![6], 9));
    }

    #[test]
    fn lengths_and_flags_follow_their_examples_into_the_split() {
        let (examples, ..) = built(
            3,
            &[(&[1, 2], &[true; 2]), (&[3, 4, 5], &[true; 3]), (&[6, 7, 8], &[false, false, true])],
        );
        // x = [0, 1, 2]; random.Random(0).shuffle(x): 0, 2, 1
        let (train, held) = examples.split(HeldOut::Count(1), 0).expect("a split");
        assert_eq!((held.tokens_of(0), held.length_of(0)), (&[1, 2, 2][..], 2));
        assert_eq!((train.length_of(0), train.predicted(0)), (3, 2));
        assert_eq!(train.targets_of(1), [None, Some(8), None]);
    }

    #[test]
    fn a_split_without_an_example_on_a_side_is_refused() {
        for (held_out, expected) in [
            (HeldOut::Count(0), "0 examples of 10"),
            (HeldOut::Count(10), "10 examples of 10"),
            (HeldOut::Share(0.04), "a share of 0.04 (0 examples) of 10"),
            (HeldOut::Share(0.96), "a share of 0.96 (10 examples) of 10"),
            (HeldOut::Share(1.5), "not between 0 and 1"),
            (HeldOut::Share(f64::NAN), "not between 0 and 1"),
        ] {
            let error = ten().split(held_out, 0).expect_err("must fail");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
