//! `--permute-channels`: what is written, what the records say, and what is refused.

use prune::linalg::StoredDtype;
use prune::model::{DecoderLayer, LinearId, ModelConfig};
use prune::synthetic::RandomCheckpoint;
use safetensors::SafeTensors;

use crate::support::{Place, TEXTS, edit_json, refuses, rewrite};

/// Two layers with biases, in bf16 and several files.
fn biased() -> Place {
    Place::with(&RandomCheckpoint {
        mlp_bias: true,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    })
}

fn bytes(place: &Place, folder: &str, name: &str) -> Vec<u8> {
    let file = std::fs::read(place.path(folder).join("model.safetensors")).expect("one file");
    let file = SafeTensors::deserialize(&file).expect("a safetensors file");
    file.tensor(name).expect("it is there").data().to_vec()
}

/// Elements of two bytes, `[rows, columns]`.
fn elements(bytes: &[u8]) -> Vec<[u8; 2]> {
    bytes.as_chunks().0.to_vec()
}

#[test]
fn rows_biases_and_columns_take_one_order_together() {
    let place = biased();
    let config = ModelConfig::load(&place.path("m")).expect("a configuration");
    let (wide, hidden) = (config.intermediate_size, config.hidden_size);
    for method in ["wanda", "magnitude", "sparsegpt", "ria"] {
        place.prune(&format!(
            "--model m --prune-method {method} --sparsity-type 2:4 --permute-channels --eval pruned --save-masks --save out --force"
        ));
        let mut moved = 0;
        for layer in 0..config.num_hidden_layers {
            let of = |folder: &str, id: LinearId| {
                elements(&bytes(&place, folder, &id.tensor_name(layer)))
            };
            let bias =
                |folder: &str, id: LinearId| elements(&bytes(&place, folder, &id.bias_name(layer)));
            // Biases of noise name the channels.
            let (old, new) = (bias("m", LinearId::GATE), bias("out/model", LinearId::GATE));
            let pairs = |channel: usize| {
                (0..wide).filter(|&from| old[from] == new[channel]).collect::<Vec<_>>()
            };
            let ups = (bias("m", LinearId::UP), bias("out/model", LinearId::UP));
            let order: Vec<usize> = (0..wide)
                .map(|channel| {
                    let candidates = pairs(channel);
                    let found = candidates.iter().find(|&&from| ups.0[from] == ups.1[channel]);
                    *found.expect("both biases of a channel move together")
                })
                .collect();
            moved += order.iter().enumerate().filter(|(at, from)| at != *from).count();
            // Where nothing is changed, kept weights are those of the source at the old place.
            if method != "sparsegpt" {
                for id in [LinearId::GATE, LinearId::UP] {
                    let (old, new) = (of("m", id), of("out/model", id));
                    for (at, value) in new.iter().enumerate() {
                        let from = order[at / hidden] * hidden + at % hidden;
                        assert!(*value == [0, 0] || *value == old[from], "{method} {at}");
                    }
                }
                let (old, new) = (of("m", LinearId::DOWN), of("out/model", LinearId::DOWN));
                for (at, value) in new.iter().enumerate() {
                    let from = at / wide * wide + order[at % wide];
                    assert!(*value == [0, 0] || *value == old[from], "{method} {at}");
                }
            }
            let down = bytes(&place, "m", &LinearId::DOWN.bias_name(layer));
            assert_eq!(down, bytes(&place, "out/model", &LinearId::DOWN.bias_name(layer)));
        }
        assert!(moved > wide, "{method}: {moved} channels moved");
        let manifest = place.manifest("out");
        assert!(manifest.pruning.expect("it was pruned").permutes_channels);
        for layer in &manifest.layers {
            let report = layer.permutation.expect("every layer was permuted");
            assert!(report.kept_after > report.kept_before, "{method}: {report:?}");
        }
        // Masks are those of the written weights.
        let masks = std::fs::read(place.path("out/masks.safetensors")).expect("masks");
        let masks = SafeTensors::deserialize(&masks).expect("a safetensors file");
        let name = "model.layers.1.mlp.down_proj";
        let bits = masks.tensor(name).expect("the mask").data();
        let weights = elements(&bytes(&place, "out/model", &format!("{name}.weight")));
        for (at, value) in weights.iter().enumerate() {
            let is_pruned = bits[at / 8] >> (at % 8) & 1 == 1;
            assert!(!is_pruned || *value == [0, 0], "{method}: {at}");
        }
        let read = DecoderLayer::load(
            &prune::checkpoint::Checkpoint::open(&place.path("out/model")).expect("a model"),
            &config,
            0,
        );
        assert!(read.is_ok());
    }
}

#[test]
fn inspect_says_that_channels_are_permuted_and_finds_other_changes() {
    let place = biased();
    let flags = "--model m --sparsity-type 2:4 --permute-channels --eval none --save out";
    place.prune(flags);
    let ran = place.run("inspect out/model --against m");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let verdict = "verdict: m pruned by wanda, with the channels of its MLPs permuted; weights at another place count as changed\n";
    assert!(ran.stdout.ends_with(verdict), "{}", ran.stdout);
    // The record beside the weights says it where the run's own is gone.
    std::fs::rename(place.path("out/run.json"), place.path("run.json")).expect("it is there");
    let ran = place.run("inspect out/model --against m --json");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.contains("\"permuted\": true"), "{}", ran.stdout);
    // Attention has no permuted weights.
    rewrite(&place, |name, _, data| {
        if name == "model.layers.0.self_attn.q_proj.weight" {
            data.iter_mut().step_by(2).for_each(|byte| *byte ^= 1);
        }
        true
    });
    let ran = place.run("inspect out/model --against m");
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    // The plain message for a record that names no permutation.
    std::fs::rename(place.path("run.json"), place.path("out/run.json")).expect("it is there");
    edit_json(&place.path("out/run.json"), |record| {
        record["pruning"]["permutes_channels"] = false.into();
        record["pruning"]["changes_weights"] = false.into();
    });
    assert_eq!(place.run("inspect out/model --against m").code, 1);
}

#[test]
fn the_published_command_repeats_the_permutation() {
    let place = biased();
    place.prune("--model m --sparsity-type 2:4 --permute-channels --eval none --save out");
    let record = std::fs::read_to_string(place.path("out/model/pruning.json")).expect("a record");
    assert!(record.contains("\"--permute-channels\""), "{record}");
}

#[test]
fn a_run_that_cannot_permute_is_refused_with_the_fix() {
    let place = Place::new();
    let refused = |more: &str, first: &str, hint: &str| {
        refuses(
            &place,
            &format!("{more} --permute-channels"),
            2,
            &format!("error: {first}"),
            &format!("hint: {hint}"),
        )
    };
    refused(
        "",
        "--permute-channels needs an N:M pattern, and the sparsity type is unstructured",
        "add --sparsity-type 2:4, or leave --permute-channels out",
    );
    let pattern = "--sparsity-type 2:4 --sparsity-ratio -";
    refused(
        &format!("{pattern} --true-sequential"),
        "--permute-channels contradicts --true-sequential",
        "leave one of them out",
    );
    refused(
        &format!("{pattern} --exclude *up_proj"),
        "--permute-channels needs `model.layers.0.mlp.up_proj`, which is not among the pruned matrices",
        "prune '*up_proj' too, or leave --permute-channels out",
    );
    refused(
        &format!("{pattern} --exclude model.layers.1.mlp.down_proj"),
        "--permute-channels needs `model.layers.1.mlp.down_proj`, which is not among the pruned matrices",
        "prune '*down_proj' too, or leave --permute-channels out",
    );
    refused(
        &format!("{pattern} --include *self_attn*"),
        "--permute-channels has nothing to permute: no MLP is among the pruned matrices",
        "prune '*mlp*' too, or leave --permute-channels out",
    );
    refused(
        &format!("{pattern} --verify full"),
        "--verify full does not fit wanda",
        "use --verify quick",
    );
}

#[test]
fn layers_without_a_pruned_mlp_stay_in_the_order_of_the_source() {
    let place = Place::new();
    place.prune("--model m --sparsity-type 2:4 --permute-channels --include model.layers.1.* --eval none --save out");
    let layers = place.manifest("out").layers;
    assert!(layers[0].permutation.is_none() && layers[1].permutation.is_some());
    let up = LinearId::UP.tensor_name(0);
    assert_eq!(bytes(&place, "m", &up), bytes(&place, "out/model", &up));
}

#[test]
fn a_resumed_run_with_a_damaged_bias_does_its_layer_again() {
    let place = biased();
    let line = format!(
        "--model m --sparsity-type 2:4 --permute-channels --eval pruned --save out {TEXTS}"
    );
    assert_eq!(place.run(&line).code, 0);
    let whole = bytes(&place, "out/model", "model.layers.1.mlp.gate_proj.bias");
    let all = std::fs::read(place.path("out/model/model.safetensors")).expect("one file");
    let mut killed = 0;
    for at in 30..80 {
        let ran = place
            .command(&format!("{line} --force"))
            .env("PRUNE_FAULT", format!("kill:{at}"))
            .output()
            .expect("the binary");
        if ran.status.success() {
            break;
        }
        let partial = place.path("out/model/model.safetensors.partial");
        let state = std::fs::read_to_string(place.path("out/model/unfinished.json"));
        let state = state.or_else(|_| std::fs::read_to_string(place.path("out/unfinished.json")));
        let is_recorded = state.is_ok_and(|state| state.contains("layers.1.mlp.gate_proj.bias"));
        if let (true, Ok(mut file)) = (is_recorded, std::fs::read(&partial)) {
            let place_of_bias = file
                .windows(whole.len())
                .position(|window| window == whole)
                .expect("it was written");
            file[place_of_bias] ^= 1;
            std::fs::write(&partial, file).expect("it can be replaced");
            killed += 1;
        }
        let ran = place.run(&line);
        assert_eq!(ran.code, 0, "{at}: {}", ran.stderr);
        let again = std::fs::read(place.path("out/model/model.safetensors")).expect("one file");
        assert!(again == all, "killed at operation {at}");
    }
    assert!(killed > 0, "no kill left a recorded bias");
}
