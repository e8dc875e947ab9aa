//! Losses and the learning rate of a training by step; of a training layer by layer, a line per layer.

use anyhow::Result;

use super::Figure;
use super::chart::{Chart, ChartLine};
use super::scale::{Axis, label};
use crate::run::{Manifest, RecoveryReport};

/// Layers of which a line is drawn, at most.
const LINES: usize = 8;

/// Draws the losses; `None` for a run that trains nothing.
pub fn losses(manifest: &Manifest) -> Result<Option<Figure>> {
    let Some(recovery) = &manifest.recovery else {
        return Ok(None);
    };
    let lines = match recovery.steps.is_empty() {
        true => of_layers(manifest),
        false => of_steps(recovery),
    };
    let what = match recovery.steps.is_empty() {
        true => "mean squared error over the first step's",
        false => "mean loss of a predicted token, nat",
    };
    let caption = match recovery.steps.is_empty() {
        true => {
            "The mean squared error of each layer's output, divided by that of its first step, before the update of each step."
        }
        false => {
            "The loss of the training examples before the update of each step, and that of the held-out examples behind it."
        }
    };
    drawn("loss", ("Loss", what, caption), lines)
}

/// Draws the learning rates; `None` for a run that does not train the whole model.
pub fn rates(manifest: &Manifest) -> Result<Option<Figure>> {
    let Some(recovery) = &manifest.recovery else {
        return Ok(None);
    };
    let points = recovery.steps.iter().map(|step| (step.step, step.rate));
    let lines = vec![line("learning rate", points)];
    let caption = "The learning rate of each step.";
    drawn("learning-rate", ("Learning rate", "rate of a step", caption), lines)
}

fn line(label: &str, points: impl Iterator<Item = (u64, f64)>) -> ChartLine {
    ChartLine {
        label: label.to_string(),
        points: points
            .filter(|(_, value)| value.is_finite())
            .map(|(step, value)| (step as f64, value))
            .collect(),
        is_marked: false,
    }
}

fn of_steps(recovery: &RecoveryReport) -> Vec<ChartLine> {
    let trained = recovery.steps.iter().map(|step| (step.step, step.loss));
    let held = recovery.held_out.iter();
    let held = held.map(|report| (report.step, report.loss));
    vec![line("training", trained), ChartLine { is_marked: true, ..line("held out", held) }]
}

/// Lines of the layers; in a deep model, only of layers at equal distances.
fn of_layers(manifest: &Manifest) -> Vec<ChartLine> {
    let every = manifest.layers.len().div_ceil(LINES).max(1);
    let layers = manifest.layers.iter().step_by(every);
    let of_layer = layers.filter_map(|layer| {
        let training = layer.training.as_ref()?;
        let losses = training.losses.iter().enumerate();
        let points = losses.map(|(at, loss)| (at as u64 + 1, loss / training.first));
        Some(line(&format!("layer {}", layer.layer), points))
    });
    of_layer.collect()
}

fn drawn(
    name: &str,
    (title, y_name, caption): (&str, &str, &str),
    mut lines: Vec<ChartLine>,
) -> Result<Option<Figure>> {
    lines.retain(|line| !line.points.is_empty());
    let points = || lines.iter().flat_map(|line| &line.points);
    let steps = points().map(|point| point.0).fold(0.0, f64::max);
    let low = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let high = points().map(|point| point.1).fold(0.0, f64::max);
    if lines.is_empty() || steps < 2.0 {
        return Ok(None);
    }
    let svg = Chart {
        title,
        y_name,
        x_name: "step",
        description: &format!("{title} over {steps} steps, from {high:.3e} to {low:.3e}."),
        x: Axis::up_to(0.0, steps, 6),
        y: Axis::around(low, high, 5),
        x_label: &label,
        y_label: &label,
        lines,
        levels: Vec::new(),
    }
    .draw()?;
    Ok(Some(Figure { name: name.to_string(), caption: caption.to_string(), svg }))
}
