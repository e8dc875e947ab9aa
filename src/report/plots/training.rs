//! Losses and the learning rate of a training by step; of a training layer by layer, a line per layer.

use super::Figure;
use super::chart::{Chart, ChartSeries, SeriesForm};
use super::scale::{Axis, range};
use crate::run::{Manifest, RecoveryReport};

/// Layers of which a line is drawn, at most.
const LINES: usize = 8;

/// Draws the losses; `None` for a run that trains nothing.
pub fn losses(manifest: &Manifest) -> Option<Figure> {
    let recovery = manifest.recovery.as_ref()?;
    let (series, y_name, caption) = if recovery.steps.is_empty() {
        (
            of_layers(manifest),
            "mean squared error over the first step's",
            "The mean squared error of each layer's output, divided by that of its first step, before the update of each step.",
        )
    } else {
        (
            of_steps(recovery),
            match recovery.closing {
                None => "mean loss of a predicted token, nat",
                Some(_) => "mean loss of a predicted token, nat; share of zeros",
            },
            match recovery.closing {
                None => {
                    "The loss of the training examples before the update of each step, and of the held-out examples after the update."
                }
                Some(_) => {
                    "The loss of the training examples before the update of each step, the loss of the held-out examples after it, and the share of zeros. Held-out losses before the last choice belong to lower sparsities; the best state is chosen among the later losses."
                }
            },
        )
    };
    let svg = drawn("Loss", y_name, series)?;
    Some(Figure { name: "loss".into(), caption: caption.into(), svg })
}

/// Draws the learning rates; `None` for a run that does not train the whole model.
pub fn rates(manifest: &Manifest) -> Option<Figure> {
    let steps = manifest.recovery.as_ref()?.steps.iter();
    let rates = steps.map(|step| (step.step, step.rate));
    let series = vec![series("learning rate", SeriesForm::Line, rates)];
    let svg = drawn("Learning rate", "rate of a step", series)?;
    let caption = "The learning rate of each step.".into();
    Some(Figure { name: "learning-rate".into(), caption, svg })
}

/// The label of the share of zeros, which is drawn beside losses.
const ZEROS: &str = "share of zeros";

fn series(label: &str, form: SeriesForm, steps: impl Iterator<Item = (u64, f64)>) -> ChartSeries {
    let points = steps.filter(|(_, value)| value.is_finite());
    ChartSeries::new(label, form, points.map(|(step, value)| (step as f64, value)))
}

fn of_steps(recovery: &RecoveryReport) -> Vec<ChartSeries> {
    let trained = recovery.steps.iter().map(|step| (step.step, step.loss));
    let last = recovery.closing.as_ref().map_or(0, |closing| closing.last_step);
    let held = |is_last: bool| {
        let held = recovery.held_out.iter().filter(move |report| (report.step >= last) == is_last);
        held.map(|report| (report.step, report.loss))
    };
    let mut all = vec![
        series("training", SeriesForm::Line, trained),
        series("held out", SeriesForm::Marked, held(true)),
    ];
    if let Some(closing) = &recovery.closing {
        let mut zeros = vec![(0, closing.before)];
        // Masks stand still between two choices.
        for choice in &closing.choices {
            let before = zeros[zeros.len() - 1].1;
            zeros.extend([(choice.step, before), (choice.step, choice.sparsity)]);
        }
        let end = recovery.steps.last().map_or(closing.last_step, |step| step.step);
        zeros.push((end, zeros[zeros.len() - 1].1));
        all.push(series("held out, lower sparsity", SeriesForm::Marked, held(false)));
        all.push(series(ZEROS, SeriesForm::Line, zeros.into_iter()));
    }
    all
}

/// Lines of the layers; in a deep model, only of layers at equal distances.
fn of_layers(manifest: &Manifest) -> Vec<ChartSeries> {
    let every = manifest.layers.len().div_ceil(LINES).max(1);
    let layers = manifest.layers.iter().step_by(every);
    let of_layer = layers.filter_map(|layer| {
        let training = layer.training.as_ref()?;
        let losses = (1..).zip(&training.losses).map(|(at, loss)| (at, loss / training.first));
        Some(series(&format!("layer {}", layer.layer), SeriesForm::Line, losses))
    });
    of_layer.collect()
}

/// Draws series over steps; `None` for fewer than two steps.
fn drawn(title: &str, y_name: &str, mut series: Vec<ChartSeries>) -> Option<String> {
    series.retain(|series| !series.points.is_empty());
    let points = series.iter().flat_map(|series| &series.points);
    let (_, steps) = range(points.clone().map(|point| point.0))?;
    let (low, high) = range(points.map(|point| point.1))?;
    let losses = series.iter().filter(|series| series.label != ZEROS);
    let (least, most) = range(losses.flat_map(|series| &series.points).map(|point| point.1))?;
    let chart = Chart {
        title,
        y_name,
        x_name: "step",
        description: &format!("{title} over {steps} steps, from {most:.3e} to {least:.3e}."),
        x: Axis::up_to(0.0, steps, 6),
        y: Axis::around(low, high, 5),
        series,
    };
    (steps >= 2.0).then(|| chart.draw())
}
