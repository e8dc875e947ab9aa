//! `--drop-layers`: scores against the goldens, the smaller model in other programs, resume, and refusals.

mod goldens;

use std::fs;

use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::linalg::StoredDtype;
use prune::run::Manifest;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::oracle::loads_in_candle;
use crate::resume::{assert_same, outcome, saved_layers};
use crate::support::{Place, TEXTS, Work, edit_json, refuses, refuses_command};

/// Five layers in several files, and a list with an entry per layer.
fn place() -> Place {
    let place = Place::with(&RandomCheckpoint {
        num_hidden_layers: 5,
        max_shard: ByteSize(300 << 10),
        ..RandomCheckpoint::default()
    });
    edit_json(&place.path("m/config.json"), |config| {
        let types = ["a", "b", "c", "d", "e"].map(Value::from);
        config["layer_types"] = types.to_vec().into();
    });
    place
}

const DROP: &str = "--model m --drop-layers 2 --eval both --save out";

fn dropped(manifest: &Manifest) -> Vec<usize> {
    let drop = manifest.layer_drop.as_ref();
    drop.expect("layers were dropped").dropped.clone()
}

/// The perplexity by `prune eval`.
fn perplexity_of(place: &Place, model: &str) -> f64 {
    let line = format!("eval {model} --eval-dataset test.txt --seqlen 64 --eval-windows 5 --json");
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let record: Value = serde_json::from_str(&ran.stdout).expect("one JSON object");
    record["perplexity"]["dense"]["perplexity"].as_f64().expect("a number")
}

#[test]
fn the_smaller_model_has_the_perplexity_of_its_record_and_loads_in_candle() {
    let place = place();
    let ran = place.prune(DROP);
    let manifest = place.manifest("out");
    let drop = manifest.layer_drop.as_ref().expect("layers were dropped");
    assert!(ran.stdout.contains("layers dropped"), "{}", ran.stdout);
    assert_eq!((drop.dropped.len(), drop.kept.len()), (2, 3));
    assert_eq!(drop.block_influence.len(), 5);
    assert_eq!(drop.angular_distance.iter().map(Vec::len).collect::<Vec<_>>(), [5, 4]);
    assert!(drop.parameters[1] < drop.parameters[0]);

    // The plan counts the scoring pass, too.
    assert_eq!(manifest.exceeded_plan(), Vec::<String>::new());
    assert_eq!(manifest.warnings, Vec::<String>::new());
    let perplexity = &manifest.perplexity;
    let dense = perplexity.dense.expect("both").perplexity;
    let pruned = perplexity.pruned.expect("both").perplexity;
    assert_eq!(perplexity_of(&place, "m"), dense);
    assert_eq!(perplexity_of(&place, "out/model"), pruned);
    loads_in_candle(&place.path("out/model")).expect("equal logits");

    let config = fs::read(place.path("out/model/config.json")).expect("it was written");
    let config: Value = serde_json::from_slice(&config).expect("JSON");
    assert_eq!(config["num_hidden_layers"], 3);
    let types = drop.kept.iter().map(|&layer| ["a", "b", "c", "d", "e"][layer]);
    assert_eq!(config["layer_types"], Value::from(types.collect::<Vec<_>>()));
}

#[test]
fn the_index_and_the_sums_are_those_of_the_new_files() {
    let place = place();
    place.prune(DROP);
    let names = place.names("out/model");
    let index = fs::read(place.path("out/model/model.safetensors.index.json")).expect("sharded");
    let index: Value = serde_json::from_slice(&index).expect("JSON");
    let map = index["weight_map"].as_object().expect("a map");
    assert!(map.values().all(|file| names.contains(file.as_str().expect("a name"))));
    assert!(map.keys().any(|name| name.starts_with("model.layers.2.")));
    assert!(!map.keys().any(|name| name.starts_with("model.layers.3.")));
    let files = names.iter().filter(|name| name.ends_with(".safetensors"));
    let count = files.count();
    let last = format!("model-{count:05}-of-{count:05}.safetensors");
    assert!(names.contains(&last), "{names:?}");
    let sums = fs::read_to_string(place.path("out/model/SHA256SUMS")).expect("sums");
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").expect("a sum and a name");
        let bytes = fs::read(place.path("out/model").join(name)).expect(name);
        assert_eq!(prune::bytes::hex(&sha256(&bytes)), sum, "{name}");
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).into()
}

#[test]
fn inspect_compares_the_layers_that_stayed_and_shows_sizes() {
    let place = place();
    place.prune(&format!("{DROP} --sparsity-ratio 0.5"));
    let ran = place.run("inspect out/model --against m");
    assert_eq!(ran.code, 0, "{}\n{}", ran.stdout, ran.stderr);
    for expected in [
        "verdict: 3 layers of m, pruned",
        "M parameters in ",
        "layers dropped: ",
        "every kept weight equals m",
    ] {
        assert!(ran.stdout.contains(expected), "{expected}: {}", ran.stdout);
    }
}

#[test]
fn dropping_first_and_pruning_then_is_dropping_and_pruning() {
    let place = place();
    place.prune(&DROP.replace("out", "two"));
    place.prune(&format!("{DROP} --sparsity-ratio 0.5 --verify full"));
    place.prune("--model two/model --sparsity-ratio 0.5 --eval pruned --save then");
    let [at_once, then] = ["out", "then"].map(|name| place.manifest(name));
    let masks = |manifest: &Manifest| -> Vec<Option<String>> {
        let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
        matrices.map(|matrix| matrix.mask_sha256.clone()).collect()
    };
    assert_eq!(masks(&at_once), masks(&then));
    assert_eq!(at_once.perplexity.pruned, then.perplexity.pruned);
    for name in place.names("out/model") {
        if name.ends_with(".safetensors") {
            let read = |run: &str| fs::read(place.path(run).join("model").join(&name)).ok();
            assert_eq!(read("out"), read("then"), "{name}");
        }
    }
}

#[test]
fn scores_depend_neither_on_threads_nor_on_the_place_of_samples() {
    let place = place();
    let mut found = Vec::new();
    let flags = [
        "--threads 1",
        "--threads 3",
        "--hidden-states disk",
        // GPUs that compute on the CPU.
        "--simulate {\"gpus\":[\"1GiB\",\"1GiB\"]}",
    ];
    for (at, flags) in flags.iter().enumerate() {
        let run = format!("run{at}");
        place.prune(&format!("{} {flags}", DROP.replace("out", &run)));
        found.push(place.manifest(&run));
    }
    for other in &found[1..] {
        assert_eq!(other.layer_drop, found[0].layer_drop);
        assert_eq!(other.perplexity, found[0].perplexity);
    }
}

#[test]
fn named_layers_are_dropped_and_the_command_repeats_it() {
    let place = place();
    let ran = place.prune("--model m --layers-dropped 3,1,3 --eval none --save out");
    let manifest = place.manifest("out");
    assert_eq!(dropped(&manifest), [1, 3]);
    assert!(ran.stdout.contains("2 of 5 layers (1, 3) by name"), "{}", ran.stdout);
    let record = fs::read(place.path("out/model/pruning.json")).expect("a record");
    let record: Value = serde_json::from_slice(&record).expect("JSON");
    let command = record["command"].as_array().expect("words").iter();
    let command: Vec<&str> = command.filter_map(Value::as_str).collect();
    let line = command.join(" ");
    assert!(line.contains("--layers-dropped 1 --layers-dropped 3"), "{line}");
    assert!(!line.contains("--drop-"), "{line}");
    let again = line.strip_prefix("prune ").expect("a command");
    let ran = place.run(&format!("{again} --force"));
    assert_eq!(ran.code, 0, "{again}\n{}", ran.stderr);
    refuses_command(
        &place,
        &format!("--model m --layers-dropped 1,5 --save new {TEXTS}"),
        2,
        "error: --layers-dropped names layer 5: the model has 5, counted from 0",
        "hint: name layers from 0 to 4",
    );
}

/// The tensors of layer k are those of the k-th layer that stayed, byte for byte.
#[test]
fn every_tensor_is_one_of_the_source() {
    let place = place();
    place.prune("--model m --layers-dropped 0,2 --eval none --save out");
    let [source, smaller] = ["m", "out/model"]
        .map(|folder| Checkpoint::open(&place.path(folder)).expect("a good checkpoint"));
    let bytes = |checkpoint: &Checkpoint, name: &str| {
        let entry = checkpoint.entry(name).expect(name);
        let mut bytes = vec![0; entry.bytes as usize];
        checkpoint.read(entry, 0, &mut bytes).expect("it is whole");
        bytes
    };
    let mut compared = 0;
    for entry in smaller.tensors() {
        let mut name = entry.name.clone();
        for (number, layer) in [1, 3, 4].into_iter().enumerate() {
            let prefix = format!("model.layers.{number}.");
            if let Some(rest) = entry.name.strip_prefix(&prefix) {
                name = format!("model.layers.{layer}.{rest}");
            }
        }
        assert!(bytes(&smaller, &entry.name) == bytes(&source, &name), "{name}");
        compared += 1;
    }
    let layer = |name: &str| name.starts_with("model.layers.0.");
    let per_layer = source.tensors().filter(|entry| layer(&entry.name)).count();
    assert_eq!(compared + 2 * per_layer, source.tensors().count());
}

#[test]
fn the_angle_rule_drops_a_span() {
    let place = place();
    place.prune(&format!("{DROP} --drop-rule angle"));
    let dropped = dropped(&place.manifest("out"));
    assert_eq!(dropped[1], dropped[0] + 1);
}

#[test]
fn a_killed_run_continues_with_the_same_bytes_and_does_not_score_again() {
    let place = Place::with(&RandomCheckpoint {
        num_hidden_layers: 5,
        dtype: StoredDtype::Bf16,
        max_shard: ByteSize(150_000),
        ..RandomCheckpoint::default()
    });
    let line = format!("{DROP} --sparsity-ratio 0.5 {TEXTS}");
    let run = |fault: Option<u64>| {
        let mut command = place.command(&line);
        if let Some(at) = fault {
            command.env("PRUNE_FAULT", format!("kill:{at}"));
        }
        let output = command.output().expect("the binary");
        let stderr = String::from_utf8(output.stderr).expect("messages are UTF-8");
        (output.status.code(), stderr)
    };
    assert_eq!(run(None).0, Some(0));
    let layers = place.manifest("out").layers.len();
    let expected = outcome(&place.path("out"));
    let mut continued = 0;
    for at in (10..200).step_by(9) {
        fs::remove_dir_all(place.path("out")).expect("removed");
        if run(Some(at)).0.is_some() {
            break;
        }
        let has_state = place.path("out/unfinished.json").exists();
        let saved = saved_layers(&place, layers);
        let (code, stderr) = run(None);
        assert_eq!(code, Some(0), "{at}: {stderr}");
        Work::of(&stderr).assert_layers_after(saved, layers, &format!("kill:{at}"));
        let scored = stderr.contains("scoring the layers");
        let is_finished = stderr.contains("this run is finished");
        assert!(!(has_state && scored), "{at}: {stderr}");
        assert!(scored || has_state || is_finished, "{at}: {stderr}");
        continued += usize::from(has_state);
        assert_same(&outcome(&place.path("out")), &expected, &format!("kill:{at}"));
    }
    assert!(continued > 3, "{continued} runs were continued");
}

#[test]
fn another_number_of_layers_is_another_run() {
    let place = place();
    let mut command = place.command(&format!("{DROP} {TEXTS}"));
    let status = command.env("PRUNE_FAULT", "kill:80").output();
    assert!(status.expect("the binary").status.code().is_none());
    let ran = place.run(&format!("{} {TEXTS}", DROP.replace("layers 2", "layers 1")));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("drop-layers: 2 there, 1 now"), "{}", ran.stderr);
}

#[test]
fn impossible_numbers_are_refused_with_a_fix() {
    let place = place();
    let line = |more: &str| format!("--model m --save out {TEXTS} {more}");
    refuses_command(
        &place,
        &line("--drop-layers 5"),
        2,
        "error: --drop-layers 5 would leave no layer: the model has 5",
        "hint: use --drop-layers 4 or less",
    );
    fs::write(place.path("ratios.json"), "{\"0\": 0.3}").expect("a new file");
    refuses(
        &place,
        "--drop-layers auto --layer-ratios ratios.json",
        2,
        "error: --layer-ratios names layers of the smaller model, and --drop-layers auto decides their number later",
        "hint: name the number: --drop-layers N",
    );
    let small = Place::new();
    refuses_command(
        &small,
        &line("--drop-layers auto"),
        2,
        "error: --drop-layers auto drops at most a quarter of the layers, and the model has 2",
        "hint: name the number: --drop-layers 1",
    );
    let one =
        Place::with(&RandomCheckpoint { num_hidden_layers: 1, ..RandomCheckpoint::default() });
    for value in ["1", "auto"] {
        let ran = one.run(&line(&format!("--drop-layers {value}")));
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        let hint = "hint: a model of one layer cannot lose it; leave --drop-layers out";
        assert!(ran.stderr.contains(hint), "{}", ran.stderr);
    }
    for value in ["0", "two"] {
        let ran = place.run(&line(&format!("--drop-layers {value}")));
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert!(ran.stderr.contains("--drop-layers"), "{}", ran.stderr);
    }
    let ran = place.run(&line("--drop-rule angle"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
}

#[test]
fn auto_says_why_it_drops_nothing() {
    // Random layers all do about the same.
    let place = place();
    let ran = place.run(&format!("--model m --drop-layers auto --save out {TEXTS}"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("error: --drop-layers auto drops no layer: the smallest score, ")
            && ran.stderr.contains("hint: --drop-layers 1 drops that layer all the same"),
        "{}",
        ran.stderr
    );
    place.prune("--model m --drop-layers auto --sparsity-ratio 0.5 --save out");
    let manifest = place.manifest("out");
    assert!(dropped(&manifest).is_empty());
    assert!(manifest.warnings.iter().any(|warning| warning.contains("drops no layer")));
}

#[test]
fn ratios_of_layers_mean_the_new_numbers() {
    let place = place();
    fs::write(place.path("ratios.json"), "[0.2, 0.4, 0.6]").expect("a new file");
    place.prune(&format!("{DROP} --layer-ratios ratios.json --include *q_proj"));
    let manifest = place.manifest("out");
    let removed = |layer: usize| {
        let matrix = &manifest.layers[layer].matrices[0];
        matrix.zeros as f64 / (matrix.shape[0] * matrix.shape[1]) as f64
    };
    for (layer, ratio) in [0.2, 0.4, 0.6].into_iter().enumerate() {
        // A row of 64 loses whole weights.
        assert!((removed(layer) - ratio).abs() < 1.0 / 64.0, "{layer}");
    }
}

#[test]
fn a_target_decides_how_much_goes() {
    let place = place();
    let sizes = |manifest: &Manifest| {
        let (layers, width) = (manifest.layer_drop.as_ref(), manifest.width_drop.as_ref());
        let parameters = layers.map(|drop| drop.parameters).or(width.map(|drop| drop.parameters));
        (parameters.expect("smaller"), layers.map(|drop| drop.dropped.len()))
    };
    place.prune("--model m --drop-layers 2 --eval none --no-save-model --save two");
    let ([whole, left], _) = sizes(&place.manifest("two"));
    let ran = place.prune(&format!(
        "--model m --drop-layers auto --target-params {left} --eval none --save exact"
    ));
    assert!(
        ran.stderr.contains(&format!("--drop-layers 2: {left} parameters stay")),
        "{}",
        ran.stderr
    );
    assert_eq!(sizes(&place.manifest("exact")), ([whole, left], Some(2)));
    // A parameter less costs a layer more.
    place.prune(&format!(
        "--model m --drop-layers auto --target-params {} --eval none --no-save-model --save less",
        left - 1
    ));
    assert_eq!(sizes(&place.manifest("less")).1, Some(3));
    // The command in the record repeats the run.
    let record: Value = serde_json::from_slice(
        &fs::read(place.path("exact/model/pruning.json")).expect("a record"),
    )
    .expect("JSON");
    let command = record["command"].as_array().expect("a list");
    assert!(command.iter().any(|word| word == "2") && !command.iter().any(|word| word == "auto"));
    // Width, in bytes.
    let bytes = Checkpoint::open(&place.path("m")).expect("a model").total_bytes().0;
    let target = bytes * 9 / 10;
    place.prune(&format!(
        "--model m --drop-width auto --target-size {target} --eval none --save narrow"
    ));
    let narrow = Checkpoint::open(&place.path("narrow/model")).expect("a model").total_bytes().0;
    assert!(narrow <= target && narrow > target * 9 / 10, "{narrow} of {target}");
    let at_least = bytes / 100;
    for (flags, code, says) in [
        ("--drop-width auto", 2, "--drop-width auto needs a size to meet".to_string()),
        ("--sparsity-ratio 0.5 --target-params 100k", 2, "which is not named".to_string()),
        ("--drop-layers auto --target-params 1B", 2, "which is not more than".to_string()),
        (&format!("--drop-layers auto --target-size {at_least}"), 2, "at least".to_string()),
        (
            &format!("--drop-width auto --target-size {at_least}"),
            2,
            "use --drop-layers auto --target-size ".to_string(),
        ),
    ] {
        let ran = place.run(&format!("--model m {flags} --save none {TEXTS}"));
        assert_eq!(ran.code, code, "{flags}: {}", ran.stderr);
        assert!(ran.stderr.contains(&says) && ran.stderr.contains("hint: "), "{}", ran.stderr);
        assert!(!place.path("none").exists());
        // The target of the hint, as it is typed.
        if let Some((_, larger)) = ran.stderr.split_once("a larger target, like ") {
            let larger = larger.split([',', '\n']).next().expect("a flag");
            let auto = flags.split(" --target").next().expect("a flag");
            place.prune(&format!("--model m {auto} {larger} --eval none --save larger --force"));
        }
    }
}
