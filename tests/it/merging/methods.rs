//! Methods on a sphere, selections and fusions, for each of their options: every element as mergekit 0.1.5 computes it.
//!
//! `methods.safetensors` has the cases and mergekit's results (made by `tests/merge_methods.py`, torch 2.15.0, on 2026-11-28). The inputs
//! are made here as they are made there.

use prune::merging::methods::{
    self, Group, MethodSettings, OnCpu, RowBlock, Semantics, SourceTask, TensorMerge, TensorTask,
};
use prune::merging::recipe::{Parameter, ParameterValues, WhenMissing};
use safetensors::SafeTensors;
use serde::Deserialize;

/// Largest difference of an element, relative to the largest element of its tensor.
const ELEMENT: f32 = 1e-6;

const RESULTS: &[u8] = include_bytes!("methods.safetensors");

#[derive(Deserialize)]
struct Case {
    name: String,
    method: String,
    experts: u32,
    is_based: bool,
    weights: Vec<f64>,
    shared: serde_json::Map<String, serde_json::Value>,
    spread: f32,
    copies: Vec<f32>,
    has_base_values: bool,
}

/// Multiples of scale / 2²⁴ between -scale / 2 and scale / 2.
fn random(seed: u32, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed;
    let value = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / 16_777_216.0 - 0.5) * scale
    };
    (0..count).map(value).collect()
}

impl Case {
    /// The base, if the case has one, and the experts.
    fn models(&self, count: usize) -> Vec<Vec<f32>> {
        let base = match self.has_base_values {
            true => random(1, count, 0.5),
            false => vec![0.0; count],
        };
        let expert = |at: u32| -> Vec<f32> {
            let factor = self.copies.get(at as usize).copied();
            let seed = if factor.is_some() { 2 } else { 2 + at };
            let steps = random(seed, count, self.spread);
            base.iter().zip(steps).map(|(base, step)| base + step * factor.unwrap_or(1.0)).collect()
        };
        let experts = (0..self.experts).map(expert);
        self.is_based.then(|| base.clone()).into_iter().chain(experts).collect()
    }

    /// The values of all models and of each model.
    fn values(&self, models: usize) -> (ParameterValues, Vec<ParameterValues>) {
        let method = methods::method(&self.method).expect("a method");
        let of = |name: &str| {
            let parameter = Parameter::ALL.into_iter().find(|of| of.name() == name);
            parameter.expect("a parameter of ours")
        };
        let mut shared = ParameterValues::default();
        for (parameter, missing) in method.declaration().shared {
            if let WhenMissing::Is(value) = missing {
                shared.set(*parameter, *value);
            }
        }
        for (name, value) in &self.shared {
            let number = value.as_bool().map(|is_on| f64::from(u8::from(is_on)));
            shared.set(of(name), number.or(value.as_f64()).expect("a number"));
        }
        let bases = usize::from(self.is_based);
        let weight = |at: usize| {
            let weight = self.weights.get(at.checked_sub(bases)?)?;
            Some((Parameter::Weight, *weight))
        };
        (shared, (0..models).map(|at| weight(at).into_iter().collect()).collect())
    }

    /// The merge of a matrix or a vector, `rows_at_once` rows at a time.
    fn merged(&self, rows: usize, columns: usize, rows_at_once: usize) -> Vec<f32> {
        let models = self.models(rows * columns);
        let (shared, values) = self.values(models.len());
        let sources: Vec<SourceTask<'_>> = values
            .iter()
            .enumerate()
            .map(|(model, values)| SourceTask { model, values, squares: None })
            .collect();
        let settings = MethodSettings {
            semantics: Semantics::Mergekit,
            scope: None,
            squares_vote: false,
            seed: 0,
        };
        let task = TensorTask {
            name: "w",
            rows,
            columns,
            sources: &sources,
            base: self.is_based.then_some(0),
            shared: &shared,
            settings: &settings,
        };
        let group = Group::new(task.elements());
        let method = methods::method(&self.method).expect("a method");
        let mut merge = method.begin(&task, &group).expect("values with a result");
        let in_pieces = |take: &mut dyn FnMut(&RowBlock<'_>)| {
            for first_row in (0..rows).step_by(rows_at_once) {
                let end = (first_row + rows_at_once).min(rows);
                let place = first_row * columns..end * columns;
                let sources: Vec<&[f32]> = models.iter().map(|of| &of[place.clone()]).collect();
                take(&RowBlock { first_row, sources: &sources });
            }
        };
        for read in 0..merge.reads() {
            in_pieces(&mut |rows| merge.measure(read, rows));
            merge.measured(read);
            group.settle();
        }
        let mut merged = Vec::new();
        in_pieces(&mut |rows| merge_rows(&mut *merge, rows, &mut merged));
        merged
    }
}

fn merge_rows(merge: &mut dyn TensorMerge, rows: &RowBlock<'_>, merged: &mut Vec<f32>) {
    let start = merged.len();
    merged.resize(start + rows.sources[0].len(), 0.0);
    merge.merge(rows, &mut OnCpu, &mut merged[start..]).expect("a result");
}

#[test]
fn every_option_gives_the_elements_of_mergekit() {
    let (_, header) = SafeTensors::read_metadata(RESULTS).expect("a header");
    let cases = &header.metadata().as_ref().expect("cases")["cases"];
    let cases: Vec<Case> = serde_json::from_str(cases).expect("cases");
    let results = SafeTensors::deserialize(RESULTS).expect("results");
    for case in &cases {
        for form in ["matrix", "vector"] {
            let name = format!("{}/{form}", case.name);
            let view = results.tensor(&name).expect("a result");
            let (rows, columns) = match *view.shape() {
                [rows, columns] => (rows, columns),
                [columns] => (1, columns),
                ref other => panic!("{other:?} is no matrix"),
            };
            let theirs = view.data().chunks(4);
            let theirs: Vec<f32> =
                theirs.map(|of| f32::from_le_bytes(of.try_into().expect("four bytes"))).collect();
            let largest = theirs.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let ours = case.merged(rows, columns, rows);
            for (at, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let difference = (ours - theirs).abs();
                assert!(difference <= ELEMENT * largest, "{name}[{at}]: {ours} and {theirs}");
            }
            for rows_at_once in [1, 2] {
                assert_eq!(case.merged(rows, columns, rows_at_once), ours, "{name} in pieces");
            }
        }
    }
    // Every method of the table that has no golden of its own in the shared data.
    for method in ["nuslerp", "karcher", "multislerp", "sce", "nearswap", "arcee_fusion"] {
        assert!(cases.iter().any(|case| case.method == method), "{method}");
    }
}
