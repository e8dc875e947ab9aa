//! The parts of the table that only recovery trainings have: what was trained, on how much text, and the losses.

use super::format::{millions, trimmed};
use crate::run::RecoveryReport;
use crate::run::manifest::LayerReport;

/// Rows of the table at the end of a run.
pub(super) fn rows(
    recovery: &RecoveryReport,
    layers: &[LayerReport],
) -> Vec<(&'static str, String)> {
    let of = match recovery.rank {
        Some(rank) => format!("factors of rank {rank}"),
        None => "kept weights".to_string(),
    };
    let (how, optim, rate) = (&recovery.how, &recovery.optim, recovery.rate);
    let parameters = millions(recovery.parameters);
    let mut rows = vec![(
        "recovery",
        format!("{how}: {of}, {parameters} parameters; {optim}, rate {rate:.3e}"),
    )];
    let mut row = |name: &'static str, value: String| rows.push((name, value));
    if let Some(closing) = &recovery.closing {
        let (before, to, last) = (trimmed(closing.before), closing.end(), closing.last_step);
        row(
            "  masks",
            match closing.choices.len() {
                0 => format!("closed to {to} before the training"),
                1 => format!("closed from {before} to {to} in step {last}"),
                choices => {
                    format!("closed from {before} to {to} in {choices} choices, by step {last}")
                }
            },
        );
    }
    if let (Some(first), Some(last)) = (recovery.steps.first(), recovery.steps.last()) {
        let tokens: u64 = recovery.steps.iter().map(|step| step.predicted).sum();
        let [first, last] =
            [first, last].map(|step| format!("{:.4} in step {}", step.loss, step.step));
        row("  loss", format!("{first}, {last}; {tokens} tokens"));
    }
    if let Some(best) = recovery.best_step
        && let Some(measured) = recovery.held_out.iter().find(|report| report.step == best)
    {
        let measured = format!("loss {:.4}, perplexity {:.4}", measured.loss, measured.perplexity);
        row("  held out", format!("{measured} after step {best}, the best"));
    }
    let losses: Vec<String> = layers
        .iter()
        .filter_map(|layer| {
            let training = layer.training.as_ref()?;
            // A layer that begins as the teacher's has no loss to compare with.
            Some(match training.first {
                0.0 => "–".to_string(),
                first => format!("{:.0}", 100.0 * training.last / first),
            })
        })
        .collect();
    if !losses.is_empty() {
        // Zeros that come during the training raise the loss, so more than 100 % is no failure.
        let meanwhile = recovery.closing.as_ref().map_or("", |_| ", while zeros were added");
        let losses = losses.join(", ");
        row("  loss left", format!("{losses} % of the first step's, by layer{meanwhile}"));
    }
    if recovery.new_zeros > 0 && recovery.closing.is_none() {
        row("  new zeros", format!("{} trained weights became zero", recovery.new_zeros));
    }
    if let Some(adapter) = &recovery.adapter {
        row("adapter", adapter.clone());
    }
    rows
}
