//! `prune eval --against` and `--eval both`: the divergence of a model from the dense model, compared with a computation in f64 that
//! `goldens/tasks/make/make_kl.py` made.

use std::fs;
use std::path::Path;

use prune::run::Manifest;
use prune::run::divergence::DivergenceReport;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::support::{Place, shared};

/// The windows of the goldens.
const WINDOWS: &str = "--eval-windows 40 --seqlen 512 --use-cpu --dtype f32";

/// A place with the dense model as `dense` and the pruned models of the goldens as `0.6` and `0.05`, and the evaluation text.
fn place(shared: &Path) -> (Place, String) {
    let place = Place::empty();
    let source = shared.join("models/stories260k");
    for (folder, weights) in [
        ("dense", source.join("model.safetensors")),
        ("0.6", shared.join("goldens/tasks/kl/wanda-0.6/model.safetensors")),
        ("0.05", shared.join("goldens/tasks/kl/wanda-0.05/model.safetensors")),
    ] {
        let folder = place.path(folder);
        fs::create_dir(&folder).expect("a new folder");
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            let file = source.join(name);
            if file.exists() {
                fs::copy(file, folder.join(name)).expect("a new file");
            }
        }
        fs::copy(weights, folder.join("model.safetensors")).expect("as the goldens have it");
    }
    let text = shared.join("data/stories/stories.test.txt");
    (place, format!("--eval-dataset wikitext2:{} {WINDOWS}", text.display()))
}

fn eval(place: &Place, line: &str) -> Manifest {
    let ran = place.run(&format!("{line} --json"));
    assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("a record")
}

fn divergence(of: &Manifest) -> DivergenceReport {
    of.perplexity.divergence.expect("two models were compared")
}

/// Figures of a report, with their names in the goldens. The first six are exact in both pairs.
fn figures(of: &DivergenceReport) -> Vec<(&'static str, f64)> {
    vec![
        ("kl_mean", of.kl_mean.value),
        ("perplexity_dense", of.perplexity_dense.value),
        ("perplexity_model", of.perplexity_model.value),
        ("probability_difference_rms", of.probability_difference_rms.value),
        ("same_top", of.same_top.value),
        ("log_perplexity_correlation", of.correlation),
        ("kl_mean_error", of.kl_mean.error),
        ("kl_median", of.kl_median),
        ("kl_quantiles/0.9", of.kl_90),
        ("kl_quantiles/0.95", of.kl_95),
        ("kl_quantiles/0.99", of.kl_99),
        ("kl_max", of.kl_max),
        ("same_top_error", of.same_top.error),
        ("perplexity_ratio", of.perplexity_ratio.value),
        ("perplexity_ratio_error", of.perplexity_ratio.error),
        ("mean_log_probability_ratio", of.log_ratio.value),
        ("mean_log_probability_ratio_error", of.log_ratio.error),
        ("probability_difference_mean", of.probability_difference.value),
        ("probability_difference_rms_error", of.probability_difference_rms.error),
    ]
}

#[test]
fn divergences_equal_a_computation_in_f64() {
    let Some(shared) = shared() else { return };
    let (place, text) = place(&shared);
    for model in ["0.6", "0.05"] {
        let golden = fs::read(shared.join(format!("goldens/tasks/kl/wanda-{model}/kl.json")));
        let golden: Value = serde_json::from_slice(&golden.expect("as the goldens have it"))
            .expect("as the goldens have it");
        for (positions, name) in [("all", "all_positions"), ("second-half", "second_half")] {
            let line = format!("eval {model} --against dense {text} --kl-positions {positions}");
            let record = eval(&place, &line);
            let text = record.evaluation.as_ref().expect("a text");
            assert_eq!(text.tokens_sha256, golden["token_ids_sha256_int32le"]);
            let report = divergence(&record);
            assert_eq!(
                report.positions,
                golden[name]["positions"].as_u64().expect("as the goldens have it")
            );
            for (at, (figure, got)) in figures(&report).into_iter().enumerate() {
                let expected = golden[name].pointer(&format!("/{figure}"));
                let expected = expected.and_then(Value::as_f64).expect(figure);
                let (apart, relative) = ((got - expected).abs(), (got / expected - 1.0).abs());
                // The README of the goldens: rounding of f32 logits alone moves single small values of the close pair by up to 7e-4.
                let is_close = relative <= 1e-5
                    || (model == "0.05" && at >= 6 && (relative <= 1e-3 || apart <= 1e-6));
                assert!(is_close, "{model} {name} {figure}: {got} is not {expected}");
            }
        }
    }
}

#[test]
fn one_sweep_two_commands_threads_and_spilled_states_give_the_same_bits() {
    let Some(shared) = shared() else { return };
    let (place, text) = place(&shared);
    let text = text.replace("--eval-windows 40", "--eval-windows 6");
    let pruned = eval(
        &place,
        &format!(
            "--model dense --prune-method magnitude --sparsity-ratio 0.4 --eval both --save out {text}"
        ),
    );
    let alone = eval(&place, &format!("eval out/model --against dense {text}"));
    let report = divergence(&pruned);
    assert_eq!(report, divergence(&alone));
    assert_eq!(pruned.perplexity.pruned, alone.perplexity.dense);
    let against = alone.against.as_ref().expect("the dense model");
    assert_eq!(pruned.perplexity.dense, against.perplexity);
    let dense = eval(&place, &format!("eval dense {text}"));
    assert_eq!(pruned.perplexity.dense, dense.perplexity.dense, "measured alone");
    for more in ["--threads 1", "--hidden-states disk --offload-folder spill"] {
        let other = eval(&place, &format!("eval out/model --against dense {text} {more}"));
        assert_eq!(report, divergence(&other), "{more}");
        assert_eq!(alone.perplexity, other.perplexity, "{more}");
    }
    let same = eval(&place, &format!("eval dense --against dense {text}"));
    let same = divergence(&same);
    assert!(same.kl_max.abs() < 1e-12 && same.same_top.value == 1.0, "{same:?}");
}

#[test]
fn both_models_pass_in_a_single_sweep_that_names_them() {
    let place = Place::new();
    let text = "--eval-dataset test.txt --seqlen 64 --eval-windows 5 --use-cpu";
    let ran = place.run(&format!("eval m --against m {text} --progress json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let events: Vec<serde_json::Value> =
        ran.stderr.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
    let named = |name: &str| -> Vec<&serde_json::Value> {
        events.iter().filter(|event| event["event"] == name).collect()
    };
    assert_eq!((named("sweep_started").len(), named("sweep_done").len()), (1, 1));
    // Two layers of each model, and the head of the second: 5 windows pass each.
    assert_eq!(named("sweep_started")[0]["passes"], 5 * 5);
    let phases = named("phase_started").into_iter().filter_map(|event| event["phase"].as_str());
    let of_layers: Vec<&str> = phases.filter(|phase| phase.starts_with("layer ")).collect();
    assert_eq!(
        of_layers,
        [
            "layer 0 of 0-1: evaluate dense",
            "layer 1 of 0-1: evaluate dense",
            "layer 0 of 0-1: evaluate model",
            "layer 1 of 0-1: evaluate model"
        ]
    );
}

#[test]
fn a_divergence_above_its_limit_misses_the_gate() {
    let place = Place::new();
    let text = "--eval-dataset test.txt --seqlen 64 --use-cpu";
    let line = format!(
        "--model m --prune-method magnitude --sparsity-ratio 0.4 --eval both --save out {text}"
    );
    let ran = place.run(&format!("{line} --max-kl 0 --quiet"));
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("gate missed: mean KL "), "{}", ran.stderr);
    let ran = place.run(&format!("eval out/model --against m {text} --max-kl 1000"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for row in ["KL from dense ", "same top token ", "perplexity ratio ", "against "] {
        assert!(ran.stdout.contains(row), "{row}\n{}", ran.stdout);
    }
    let ran = place.run(&format!("eval out/model {text} --max-kl 1"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: name the dense model with --against"), "{}", ran.stderr);
    let ran = place.run(&format!("eval out/model {text} --kl-positions second-half"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    let alone = line.replace("--eval both", "--kl-positions second-half");
    let ran = place.run(&alone.replace("--save out", "--save alone"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: add --eval both"), "{}", ran.stderr);
    let of_same = place.run(&format!("eval out/model --against out/model {text} --json"));
    let same: Manifest = serde_json::from_str(&of_same.stdout).expect("a record");
    let divergence = same.perplexity.divergence.expect("a divergence");
    assert_eq!(divergence.probability_difference_rms.error, 0.0, "of equal models");
}

#[test]
fn a_dense_model_that_does_not_fit_is_named_and_vocabularies_come_first() {
    let place = Place::new();
    let text = "--eval-dataset test.txt --eval-windows 1";
    for (vocab_size, positions, code, says) in [
        (512, 128, 1, "have vocabularies of 320 and 512 tokens"),
        (320, 128, 2, "the windows have 512 tokens, and `small` of --against has 128 positions"),
    ] {
        let small = RandomCheckpoint {
            vocab_size,
            max_position_embeddings: positions,
            ..RandomCheckpoint::default()
        };
        let _ = fs::remove_dir_all(place.path("small"));
        place.checkpoint("small", &small);
        let ran = place.run(&format!("eval m --against small {text}"));
        assert_eq!(ran.code, code, "{}", ran.stderr);
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
    let ran = place.run(&format!("eval m --against small {text} --seqlen 128"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}
