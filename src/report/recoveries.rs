//! The parts of the table that only recovery trainings have: what was trained, on how much text, and the losses.

use crate::run::RecoveryReport;
use crate::run::manifest::LayerReport;

/// Rows of the table at the end of a run.
pub(super) fn rows(recovery: &RecoveryReport, layers: &[LayerReport]) -> Vec<(String, String)> {
    let of = match recovery.rank {
        Some(rank) => format!("factors of rank {rank}"),
        None => "kept weights".to_string(),
    };
    let mut rows = vec![(
        "recovery".to_string(),
        format!(
            "{}: {of}, {:.1} M parameters; {}, rate {:.3e}",
            recovery.how,
            recovery.parameters as f64 / 1e6,
            recovery.optim,
            recovery.rate
        ),
    )];
    let mut row = |name: &str, value: String| rows.push((name.to_string(), value));
    if let (Some(first), Some(last)) = (recovery.steps.first(), recovery.steps.last()) {
        let tokens: u64 = recovery.steps.iter().map(|step| step.predicted).sum();
        row(
            "  loss",
            format!(
                "{:.4} in step {}, {:.4} in step {}; {tokens} tokens",
                first.loss, first.step, last.loss, last.step
            ),
        );
    }
    if let Some(best) = recovery.best_step
        && let Some(measured) = recovery.held_out.iter().find(|report| report.step == best)
    {
        row(
            "  held out",
            format!(
                "loss {:.4}, perplexity {:.4} behind step {best}, the best",
                measured.loss, measured.perplexity
            ),
        );
    }
    let losses: Vec<String> = layers
        .iter()
        .filter_map(|layer| {
            let training = layer.training.as_ref()?;
            // A layer that is as in the teacher has nothing to lose.
            let left = match training.first {
                0.0 => 100.0,
                first => 100.0 * training.last / first,
            };
            Some(format!("{left:.0}"))
        })
        .collect();
    if !losses.is_empty() {
        row("  loss left", format!("{} % of the first step's, by layer", losses.join(", ")));
    }
    if recovery.new_zeros > 0 {
        row("  new zeros", format!("{} trained weights became zero", recovery.new_zeros));
    }
    if let Some(adapter) = &recovery.adapter {
        row("adapter", adapter.clone());
    }
    rows
}
