//! Exit codes of commands that did their work.

use std::process::ExitCode;

use super::console::Console;
use crate::run::Manifest;

/// The end of a command that did its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Done,
    /// Done, and `--max-perplexity` is missed.
    GateMissed,
}

impl Outcome {
    /// The outcome of a run, with a word about a gate that is missed.
    pub(super) fn of(manifest: &Manifest, console: &Console) -> Self {
        match manifest.gate {
            Some(gate) if !gate.is_met => {
                let why = if gate.perplexity.is_finite() {
                    format!(
                        "perplexity {:.4} is above --max-perplexity {}",
                        gate.perplexity, gate.max_perplexity
                    )
                } else {
                    format!(
                        "the perplexity is not finite (--max-perplexity {})",
                        gate.max_perplexity
                    )
                };
                console.error(&format!("gate missed: {why}"));
                Self::GateMissed
            }
            _ => Self::Done,
        }
    }

    /// 0 or 4.
    pub fn exit_code(self) -> ExitCode {
        match self {
            Self::Done => ExitCode::SUCCESS,
            Self::GateMissed => ExitCode::from(4),
        }
    }
}
