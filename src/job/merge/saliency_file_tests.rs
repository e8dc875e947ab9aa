//! Files of statistics: written, read, and refused.

use super::*;
use crate::model::InputMap;

fn measurement(fingerprint: &str) -> Measurement {
    Measurement {
        model: "m".to_string(),
        fingerprint: fingerprint.to_string(),
        dataset: "wikitext2".to_string(),
        nsamples: 64,
        seqlen: 512,
        seed: 0,
        dtype: "f32".to_string(),
        num_hidden_layers: 2,
        tokens_sha256: "t".to_string(),
        arithmetic: "f32 by fused".to_string(),
    }
}

fn layer(value: f32) -> LayerSquares {
    InputMap::new(|input| vec![value; [2, 3, 2, 4][input as usize]])
}

fn model(fingerprint: &str, layers: usize) -> MeasuredModel {
    MeasuredModel {
        measurement: measurement(fingerprint),
        layers: (0..layers).map(|at| layer(at as f32 + 1.0)).collect(),
    }
}

#[test]
fn a_file_is_read_as_it_was_written_begun_models_included() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.safetensors");
    assert_eq!(SaliencyFile::read(&path).unwrap(), None);
    let file = SaliencyFile { models: vec![model("a", 2), model("b", 1), model("c", 0)] };
    file.write(&path).unwrap();
    assert_eq!(SaliencyFile::read(&path).unwrap().unwrap(), file);
    assert!(file.complete("a").is_some() && file.complete("b").is_none());
}

#[test]
fn statistics_of_other_settings_are_refused_with_the_differences() {
    let file = SaliencyFile { models: vec![model("a", 2), model("b", 1)] };
    let path = Path::new("s.safetensors");
    let asked = measurement("a");
    assert!(file.asked(&asked, path).unwrap().is_some());
    let other = Measurement { seqlen: 256, seed: 7, ..asked };
    let error = file.asked(&other, path).unwrap_err();
    let failure = error.downcast_ref::<Failure>().unwrap();
    let expected = ["--seqlen: 512 there, 256 now", "--seed: 0 there, 7 now"];
    assert_eq!(failure.details, expected);
    assert!(file.asked(&measurement("b"), path).unwrap().is_none());
    assert!(file.asked(&measurement("c"), path).unwrap().is_none());
}

#[test]
fn a_measurement_continues_only_with_the_same_tokens_and_arithmetic() {
    let mut file = SaliencyFile { models: vec![model("a", 1)] };
    let same = Measurement { model: "elsewhere/m".to_string(), ..measurement("a") };
    assert_eq!((file.begin(&same), file.models[0].layers.len()), (0, 1));
    let other = Measurement { arithmetic: "bf16 by amx".to_string(), ..same };
    assert_eq!((file.begin(&other), file.models[0].layers.len()), (0, 0));
    assert_eq!(file.begin(&measurement("b")), 1);
}

#[test]
fn damaged_files_and_files_of_another_kind_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.safetensors");
    let says = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = SaliencyFile::read(&path).unwrap_err();
        let failure = error.downcast_ref::<Failure>().unwrap();
        format!("{} {:?}", failure.message, failure.details)
    };
    let mut file = SaliencyFile { models: vec![model("a", 2)] };
    file.models[0].layers[1][InputId::Mlp][0] = f32::NAN;
    file.write(&path).unwrap();
    let found = says(&std::fs::read(&path).unwrap());
    assert!(found.contains("0.model.layers.1.mlp_in") && found.contains("NaN"), "{found}");
    let plain = encode_header(&BTreeMap::new(), &[]);
    assert!(says(&plain).contains("no entry `prune_saliency`"));
    let metadata = |version: &str, models: &str| {
        let pairs = [("prune_saliency", version), ("models", models)];
        let pairs = pairs.map(|(name, text)| (name.to_string(), text.to_string()));
        encode_header(&BTreeMap::from(pairs), &[])
    };
    assert!(says(&metadata("1", "[]")).contains("version 1"));
    assert!(says(&metadata(VERSION, "[{}]")).contains("list of models is damaged"));
    assert!(says(b"x").contains("too few"));
}
