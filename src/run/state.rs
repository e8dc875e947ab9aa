//! `unfinished.json`: what a run that has not ended yet has finished, so that another process can go on.
//!
//! It is replaced after every layer, once the layer's bytes are on the disk; what it says is therefore true at any moment, however
//! the process ends. The schema is documented in docs/run-json.md.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::manifest::{LayerReport, MemorySample, Perplexities, PhaseReport};

/// The version of the schema; another one is not gone on from.
pub const SCHEMA: u32 = 1;

/// The file's name in the run folder.
pub const FILE: &str = "unfinished.json";

/// A run between two layers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunState {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The command line as it was first given.
    pub arguments: Vec<String>,
    /// When the run first began, in seconds since 1970 (UTC).
    pub started_unix_seconds: u64,
    /// Everything that decides the outcome, by name, in words: two processes may work on one run only where all are equal.
    pub settings: BTreeMap<String, String>,
    /// The finished layers, in order.
    pub layers: Vec<LayerReport>,
    /// Tensors that were written → SHA-256 of their bytes, in hex.
    pub tensors: BTreeMap<String, String>,
    /// What was measured, once all of it is.
    pub perplexity: Option<Perplexities>,
    /// Everything the user was warned of.
    pub warnings: Vec<String>,
    /// The processes that worked on it, in order; the last one up to now.
    pub sessions: Vec<Session>,
    /// Time and peak memory per phase, of all sessions.
    pub phases: Vec<PhaseReport>,
    /// Memory at the checkpoints of all sessions.
    pub memory: Vec<MemorySample>,
}

/// One process that worked on a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// When it began, in seconds since 1970 (UTC).
    pub started_unix_seconds: u64,
    /// How long it worked, as far as is known: up to the last layer it finished where it did not end by itself.
    pub seconds: f64,
    /// Layers that were finished when it began.
    pub first_layer: usize,
}

impl RunState {
    /// Where `settings` differ from those of this run: name, value here, value there. Names that only one of them has count where
    /// they are in `settings`.
    pub fn differences(
        &self,
        settings: &BTreeMap<String, String>,
    ) -> Vec<(String, String, String)> {
        let different = settings.iter().filter_map(|(name, now)| {
            let then = self.settings.get(name).map_or("nothing", String::as_str);
            (then != now).then(|| (name.clone(), then.to_string(), now.clone()))
        });
        different.collect()
    }
}

/// Adds up phases of several sessions: seconds are summed, peaks are the largest.
pub fn merge_phases(before: &[PhaseReport], now: &[PhaseReport]) -> Vec<PhaseReport> {
    let mut phases = before.to_vec();
    for phase in now {
        match phases.iter_mut().find(|known| known.phase == phase.phase) {
            Some(known) => {
                known.seconds += phase.seconds;
                known.peak_anonymous = known.peak_anonymous.max(phase.peak_anonymous);
            }
            None => phases.push(phase.clone()),
        }
    }
    phases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_differ_are_named_with_both_values() {
        let settings = |values: &[(&str, &str)]| -> BTreeMap<String, String> {
            let pairs = values.iter();
            pairs
                .map(|(name, value)| (name.to_string(), value.to_string()))
                .collect()
        };
        let state = RunState {
            schema: SCHEMA,
            arguments: Vec::new(),
            started_unix_seconds: 0,
            settings: settings(&[("a", "1"), ("b", "2"), ("c", "3")]),
            layers: Vec::new(),
            tensors: BTreeMap::new(),
            perplexity: None,
            warnings: Vec::new(),
            sessions: Vec::new(),
            phases: Vec::new(),
            memory: Vec::new(),
        };
        let found = state.differences(&settings(&[("a", "1"), ("b", "3"), ("d", "4")]));
        let expected = [("b", "2", "3"), ("d", "nothing", "4")];
        assert_eq!(
            found,
            expected.map(|(name, then, now)| (name.to_string(), then.to_string(), now.to_string()))
        );
    }

    #[test]
    fn phases_of_sessions_add_up() {
        let phase = |name: &str, seconds, peak| PhaseReport {
            phase: name.to_string(),
            seconds,
            peak_anonymous: Some(crate::bytes::ByteSize(peak)),
        };
        let merged = merge_phases(
            &[phase("read", 1.0, 5), phase("write", 2.0, 1)],
            &[phase("read", 0.5, 7), phase("head", 1.0, 2)],
        );
        let expected = [
            phase("read", 1.5, 7),
            phase("write", 2.0, 1),
            phase("head", 1.0, 2),
        ];
        assert_eq!(merged, expected);
    }
}
