//! Learning rates of steps: constant, linear or cosine, after a linear warm-up.
//!
//! ```text
//! step < warmup    rate · step / warmup                        the first step has rate 0
//! constant         rate
//! linear           rate · (steps - step) / (steps - warmup)
//! cosine           rate · ½ (1 + cos(π (step - warmup) / (steps - warmup)))
//! ```
//!
//! Steps are counted from 0 here. The reference is `transformers.optimization`.

use std::f64::consts::PI;

use clap::ValueEnum;
use serde::Serialize;

/// The shape of a schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleShape {
    /// The same rate
    Constant,
    /// A line down to 0
    Linear,
    /// Half a cosine down to 0
    Cosine,
}

impl ScheduleShape {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
        }
    }
}

/// Learning rates of a training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The shape after the warm-up.
    pub shape: ScheduleShape,
    /// The largest rate.
    pub rate: f64,
    /// Steps of the warm-up.
    pub warmup: u64,
    /// Steps of the training, warm-up included.
    pub steps: u64,
}

impl Schedule {
    /// The rate of a step, counted from 0. Steps after the last have the rate that the formula gives, at least 0.
    pub fn rate_of(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.rate * step as f64 / self.warmup as f64;
        }
        let whole = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let share = (step - self.warmup) as f64 / whole;
        let factor = match self.shape {
            ScheduleShape::Constant => 1.0,
            ScheduleShape::Linear => 1.0 - share,
            // After its end the cosine would rise again.
            ScheduleShape::Cosine => 0.5 * (1.0 + (PI * share.min(1.0)).cos()),
        };
        self.rate * factor.max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::golden_tests::golden_folder;

    #[test]
    fn the_cosine_is_that_of_a_recorded_training() {
        let Some(folder) = golden_folder() else {
            return;
        };
        let text = std::fs::read_to_string(folder.join("curve.lora.json")).unwrap();
        let record: serde_json::Value = serde_json::from_str(&text).unwrap();
        let rates = record["lr_of_step"].as_array().unwrap();
        let schedule = Schedule {
            shape: ScheduleShape::Cosine,
            rate: record["lr"].as_f64().unwrap(),
            warmup: record["warmup"].as_u64().unwrap(),
            steps: record["steps"].as_u64().unwrap(),
        };
        assert_eq!(rates.len(), 200);
        for (step, expected) in rates.iter().enumerate() {
            // The file has nine digits.
            let (found, expected) = (schedule.rate_of(step as u64), expected.as_f64().unwrap());
            assert!((found - expected).abs() <= 1e-9 * schedule.rate, "{step}: {found} {expected}");
        }
    }

    #[test]
    fn lines_end_at_zero_and_a_training_without_warm_up_begins_at_the_rate() {
        let schedule = |shape, warmup| Schedule { shape, rate: 2.0, warmup, steps: 10 };
        let linear = schedule(ScheduleShape::Linear, 2);
        let rates = [0, 1, 2, 6, 10, 11].map(|step| linear.rate_of(step));
        assert_eq!(rates, [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]);
        for shape in [ScheduleShape::Constant, ScheduleShape::Linear, ScheduleShape::Cosine] {
            assert_eq!(schedule(shape, 0).rate_of(0), 2.0);
        }
        assert_eq!(schedule(ScheduleShape::Constant, 4).rate_of(9), 2.0);
        assert_eq!(schedule(ScheduleShape::Cosine, 2).rate_of(30), 0.0);
        // A warm-up as long as the training.
        assert_eq!(schedule(ScheduleShape::Cosine, 10).rate_of(9), 1.8);
    }
}
