//! Distances of merged layers from the models, and conflicts of signs, against their definitions in f64. That threads, pieces and
//! interruptions do not change them is tested with all other files of a merge.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::run::merging::MergeReport;
use prune::synthetic::RandomCheckpoint;

use super::{merge, tensors};

type Model = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// All tensors of a model.
fn model(folder: &Path) -> Model {
    let files = fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").path());
    let weights = files.filter(|file| file.extension().is_some_and(|of| of == "safetensors"));
    weights.flat_map(|file| tensors(&file)).collect()
}

/// Distances of the merged model from each model, and the share of conflicts, over the tensors of a layer.
fn direct(layer: usize, models: &[Model], merged: &Model) -> (Vec<f64>, f64) {
    let prefix = format!("model.layers.{layer}.");
    let names: Vec<&String> = merged.keys().filter(|name| name.starts_with(&prefix)).collect();
    assert_eq!(names.len(), 9, "seven linears and two norms");
    let distance = |model: &Model| {
        let (mut distance, mut norm) = (0.0, 0.0);
        for name in &names {
            for (merged, own) in merged[*name].1.iter().zip(&model[*name].1) {
                distance += (merged - own).powi(2);
                norm += own.powi(2);
            }
        }
        f64::sqrt(distance / norm)
    };
    let (mut conflicts, mut elements) = (0, 0);
    for name in &names {
        for (at, base) in models[0][*name].1.iter().enumerate() {
            let experts = || models[1..].iter().map(|model| model[*name].1[at]);
            let conflict = experts().any(|own| own > *base) && experts().any(|own| own < *base);
            conflicts += u32::from(conflict);
            elements += 1;
        }
    }
    (models.iter().map(distance).collect(), f64::from(conflicts) / f64::from(elements))
}

#[test]
fn layers_are_as_far_from_the_models_as_their_elements_say() {
    let place = super::place(2);
    let models = ["m", "e1", "e2"].map(|name| model(&place.path(name)));
    for flags in ["--method ties --density 0.4", "--method task_arithmetic --out-dtype f32"] {
        merge(&place, &format!("--base m --model e1 --model e2 {flags} --force --save out"));
        let report = place.manifest("out").merge.expect("a merge");
        let merged = model(&place.path("out/model"));
        assert_eq!(report.layers.len(), 2);
        for (at, layer) in report.layers.iter().enumerate() {
            let (distances, conflicts) = direct(at, &models, &merged);
            assert_eq!((layer.layer, layer.distances.len()), (at, 3));
            for (found, expected) in layer.distances.iter().zip(distances) {
                let found = found.expect("the layer has tensors of every model");
                assert!((found - expected).abs() < 1e-12 * expected, "{found} {expected}");
            }
            assert_eq!(layer.sign_conflicts, Some(conflicts), "layer {at}");
        }
        // The record beside the weights has the same numbers, and the page shows them.
        let beside = fs::read(place.path("out/model/merging.json")).expect("a record");
        let beside: MergeReport = serde_json::from_slice(&beside).expect("JSON");
        assert_eq!(beside.layers, report.layers);
        assert_eq!(place.run("report out").code, 0);
        let page = fs::read_to_string(place.path("out/report/report.html")).expect("a page");
        let shown = format!("{:.6}", report.layers[1].sign_conflicts.expect("measured"));
        assert!(page.contains("distance from e2") && page.contains(&shown), "{page}");
    }
}

#[test]
fn without_a_base_no_signs_conflict_and_a_stack_is_compared_with_nothing() {
    let place = super::place(2);
    place.checkpoint("one", &RandomCheckpoint { num_hidden_layers: 2, ..Default::default() });
    merge(&place, "--model e1 --model e2 --method linear --weight 1,1 --save out");
    let report = place.manifest("out").merge.expect("a merge");
    assert_eq!(report.layers.len(), 2);
    assert!(report.layers.iter().all(|layer| layer.sign_conflicts.is_none()));
    merge(&place, "--model one --method passthrough --save copy");
    let report = place.manifest("copy").merge.expect("a merge");
    assert!(report.layers.is_empty());
    assert!(report.tensors.iter().all(|tensor| tensor.distances.is_empty()));
}
