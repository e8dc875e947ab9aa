//! The fraction of a matrix to remove, and the pattern of the zeros.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::failure::Failure;

/// Allowed positions of zeros.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pattern {
    /// Anywhere.
    #[default]
    Unstructured,
    /// `n` pruned of each aligned group of `m` neighbours along the input features.
    NOfM {
        /// Weights pruned per group (the original's convention; NVIDIA counts what is kept).
        n: usize,
        /// Weights per group.
        m: usize,
    },
}

impl FromStr for Pattern {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        if text == "unstructured" {
            return Ok(Self::Unstructured);
        }
        let bad = |why: String| {
            Failure::usage(format!("`{text}` is not a sparsity type: {why}"))
                .hint("use `unstructured`, or N:M with N pruned of M, like 2:4")
        };
        let (n, m) = text
            .split_once(':')
            .ok_or_else(|| bad("it is neither `unstructured` nor N:M".into()))?;
        let number = |part: &str| {
            part.parse::<usize>().map_err(|_| bad(format!("`{part}` is not a number")))
        };
        let (n, m) = (number(n)?, number(m)?);
        if n == 0 || n >= m {
            return Err(bad(format!("N must lie between 1 and M - 1, and {n} of {m} does not")));
        }
        Ok(Self::NOfM { n, m })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unstructured => f.write_str("unstructured"),
            Self::NOfM { n, m } => write!(f, "{n}:{m}"),
        }
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The ratio and pattern for a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Target {
    /// The fraction removed, in [0, 1).
    pub ratio: f64,
    /// Allowed positions of zeros.
    pub pattern: Pattern,
}

impl Target {
    /// Weights to remove of `count`: `int(count * ratio)`, truncated as Python does.
    pub fn count_of(&self, count: usize) -> usize {
        (count as f64 * self.ratio) as usize
    }

    /// Returns whether this is a ratio of 0 without an N:M pattern.
    pub fn removes_nothing(&self) -> bool {
        self.ratio == 0.0 && self.pattern == Pattern::Unstructured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_parse_and_print_alike() {
        for text in ["unstructured", "2:4", "16:32"] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
        for text in ["4:2", "0:4", "2:2", "2-4", "a:4", "dense"] {
            let failure = text.parse::<Pattern>().unwrap_err();
            assert!(failure.is_usage && failure.message.contains(text), "{failure}");
        }
    }

    #[test]
    fn counts_truncate_like_python() {
        let target = |ratio| Target { ratio, pattern: Pattern::Unstructured };
        // int(172 * 0.6) = 103, int(688 * 0.5) = 344, int(10 * 0.7) = 7 in CPython 3.11.
        assert_eq!(
            (target(0.6).count_of(172), target(0.5).count_of(688), target(0.7).count_of(10)),
            (103, 344, 7)
        );
    }
}
