//! Exit codes of commands that did their work.

use std::process::ExitCode;

use super::console::Console;
use crate::failure::{Failure, describe};
use crate::run::Manifest;
use crate::run::manifest::LimitReport;

/// The end of a command that did its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Done,
    /// Done, and a gate is missed.
    GateMissed,
    /// A training diverged, and its best state is the model.
    Diverged,
}

impl Outcome {
    /// The outcome of a run, with a word about a training that diverged and a gate that is missed.
    pub(super) fn of(manifest: &Manifest, console: &Console) -> Self {
        let recovery = manifest.recovery.as_ref();
        if let Some(divergence) = recovery.and_then(|recovery| recovery.divergence.as_ref()) {
            let [message, kept] = divergence.lines();
            let failure = Failure::new(message).detail(kept).hint(format!(
                "repeat the command with another rate to continue from that state, like --lr {}",
                divergence.smaller_rate()
            ));
            console.error(&describe(&failure.into()));
            return Self::Diverged;
        }
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
            _ => Self::of_limits(manifest, console),
        }
    }

    /// The outcome of the gates besides `--max-perplexity`.
    fn of_limits(manifest: &Manifest, console: &Console) -> Self {
        let mut outcome = Self::Done;
        for missed in manifest.limits.iter().filter(|limit| !limit.is_met) {
            let LimitReport { flag, limit, name, value, .. } = missed;
            let why = match value.is_finite() {
                true => format!("{name} {value:.6} does not meet {flag} {limit}"),
                false => format!("{name} is not finite ({flag} {limit})"),
            };
            console.error(&format!("gate missed: {why}"));
            outcome = Self::GateMissed;
        }
        outcome
    }

    /// 0, 4 or 1.
    pub fn exit_code(self) -> ExitCode {
        match self {
            Self::Done => ExitCode::SUCCESS,
            Self::GateMissed => ExitCode::from(4),
            Self::Diverged => ExitCode::FAILURE,
        }
    }
}
