//! `--drop-width`: scores against FLAP's, the narrower model in other programs, the worth of the refit, resume, and refusals.

mod goldens;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::golden::dataset;
use crate::oracle::loads_in_candle;
use crate::resume::{assert_same, outcome, saved_layers};
use crate::support::{self, Place, TEXTS, Work, refuses_command};

/// Three layers of 4 query heads and 2 key/value heads.
fn place() -> Place {
    Place::with(&RandomCheckpoint { num_hidden_layers: 3, ..RandomCheckpoint::default() })
}

const DROP: &str = "--model m --drop-width 0.3 --eval both --save out";

fn config(place: &Place, model: &str) -> Value {
    let text = fs::read(place.path(model).join("config.json")).expect("it was written");
    serde_json::from_slice(&text).expect("JSON")
}

/// The perplexity by `prune eval`.
fn perplexity_of(place: &Place, model: &str) -> f64 {
    let line = format!("eval {model} --eval-dataset test.txt --seqlen 64 --eval-windows 5 --json");
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let record: Value = serde_json::from_str(&ran.stdout).expect("one JSON object");
    let perplexity = &record["perplexity"]["dense"]["perplexity"];
    perplexity.as_f64().expect("a number")
}

#[test]
fn the_narrower_model_has_the_perplexity_of_its_record_and_loads_in_candle() {
    let place = place();
    let ran = place.prune(DROP);
    let manifest = place.manifest("out");
    let drop = manifest.width_drop.as_ref().expect("width was dropped");
    assert!(ran.stdout.contains("width dropped"), "{}", ran.stdout);
    let [before, after] = drop.intermediate_size;
    assert!(after < before && after % drop.multiple == 0);
    assert_eq!(drop.num_attention_heads[0], drop.num_attention_heads[1]);
    assert!(drop.parameters[1] < drop.parameters[0]);
    assert!(drop.lost_scores.iter().all(|lost| lost[0] == 0.0 && lost[1] > 0.0 && lost[1] < 0.3));

    // The plan counts the pass, too.
    assert_eq!(manifest.exceeded_plan(), Vec::<String>::new());
    assert_eq!(manifest.warnings, Vec::<String>::new());
    let perplexity = &manifest.perplexity;
    let dense = perplexity.dense.expect("both").perplexity;
    let pruned = perplexity.pruned.expect("both").perplexity;
    assert_eq!(perplexity_of(&place, "m"), dense);
    assert_eq!(perplexity_of(&place, "out/model"), pruned);
    loads_in_candle(&place.path("out/model")).expect("equal logits");
    assert_eq!(config(&place, "out/model")["intermediate_size"], after);
    assert!(!place.path("out/narrower").exists(), "it is removed at the end");

    let ran = place.run("inspect out/model --against m");
    assert_eq!(ran.code, 0, "{}\n{}", ran.stdout, ran.stderr);
    for expected in ["M parameters in ", "width dropped: ", "verdict: m made narrower"] {
        assert!(ran.stdout.contains(expected), "{expected}: {}", ran.stdout);
    }
}

#[test]
fn heads_go_with_their_keys_and_the_config_says_their_width() {
    let place = place();
    place.prune(
        &format!("{DROP} --width-of both --drop-width 0.5").replace("--drop-width 0.3 ", ""),
    );
    let manifest = place.manifest("out");
    let drop = manifest.width_drop.as_ref().expect("width was dropped");
    let (before, after) = (config(&place, "m"), config(&place, "out/model"));
    let number = |config: &Value, key: &str| config[key].as_u64().expect("a number") as usize;
    let heads = number(&before, "num_attention_heads");
    assert_eq!(number(&after, "num_attention_heads"), heads / 2);
    assert_eq!(number(&after, "num_key_value_heads") * 2, number(&before, "num_key_value_heads"));
    assert_eq!(number(&after, "head_dim"), number(&before, "hidden_size") / heads);
    assert_eq!(drop.kept_heads.len(), 3);
    let pruned = manifest.perplexity.pruned.expect("both").perplexity;
    assert_eq!(perplexity_of(&place, "out/model"), pruned);
}

#[test]
fn narrower_first_and_pruned_then_is_both_at_once() {
    let place = place();
    place.prune(&DROP.replace("out", "two"));
    place.prune(&format!("{DROP} --sparsity-ratio 0.5 --verify full"));
    place.prune("--model two/model --sparsity-ratio 0.5 --eval pruned --save then");
    let [at_once, then] = ["out", "then"].map(|name| place.manifest(name));
    assert_eq!(at_once.perplexity.pruned, then.perplexity.pruned);
    let read = |run: &str| fs::read(place.path(run).join("model/model.safetensors")).ok();
    assert!(read("out").is_some() && read("out") == read("then"));
}

#[test]
fn layers_and_width_are_dropped_in_one_run() {
    let place = place();
    place.prune(&format!("{DROP} --drop-layers 1"));
    let manifest = place.manifest("out");
    let layers = manifest.layer_drop.as_ref().expect("layers were dropped");
    let width = manifest.width_drop.as_ref().expect("width was dropped");
    assert_eq!(layers.parameters[1], width.parameters[0]);
    let perplexity = &manifest.perplexity;
    assert_eq!(perplexity_of(&place, "m"), perplexity.dense.expect("both").perplexity);
    let pruned = perplexity.pruned.expect("both").perplexity;
    assert_eq!(perplexity_of(&place, "out/model"), pruned);
    loads_in_candle(&place.path("out/model")).expect("equal logits");
}

#[test]
fn neither_threads_nor_the_place_of_samples_change_the_result() {
    let place = place();
    let mut found = Vec::new();
    for (at, flags) in [
        "--threads 1",
        "--threads 3 --hidden-states disk",
        "--simulate {\"gpus\":[\"1GiB\",\"1GiB\"]}",
    ]
    .iter()
    .enumerate()
    {
        let run = format!("run{at}");
        place.prune(&format!("{} --width-of both {flags}", DROP.replace("out", &run)));
        let model = fs::read(place.path(&run).join("model/model.safetensors"));
        found.push((model.expect("it was written"), place.manifest(&run).width_drop));
    }
    assert!(found.iter().all(|other| *other == found[0]));
}

#[test]
fn a_killed_run_continues_or_begins_again() {
    let place = place();
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
    let (mut continued, mut begun) = (0, 0);
    for at in (10..300).step_by(19) {
        fs::remove_dir_all(place.path("out")).expect("removed");
        if run(Some(at)).0.is_some() {
            break;
        }
        let has_state = place.path("out/unfinished.json").exists();
        let saved = saved_layers(&place, layers);
        let (code, stderr) = run(None);
        assert_eq!(code, Some(0), "{at}: {stderr}");
        Work::of(&stderr).assert_layers_after(saved, layers, &format!("kill:{at}"));
        let narrowed = stderr.contains("making the layers narrower");
        assert!(!(has_state && narrowed), "{at}: {stderr}");
        continued += usize::from(has_state);
        begun += usize::from(narrowed);
        assert_same(&outcome(&place.path("out")), &expected, &format!("kill:{at}"));
        assert!(!place.path("out/narrower").exists(), "{at}");
    }
    assert!(continued > 1 && begun > 1, "{continued} continued, {begun} begun again");
}

#[test]
fn impossible_shares_are_refused_with_a_fix() {
    let place = place();
    let line = |more: &str| format!("--model m {TEXTS} {more}");
    refuses_command(
        &place,
        &line("--drop-width 0.1 --width-of heads --save out"),
        2,
        "error: --drop-width 0.1 --width-of heads would drop nothing: a layer has 2 key/value heads",
        "hint: use --drop-width 0.251 or more",
    );
    let eight = Place::with(&RandomCheckpoint {
        num_attention_heads: 8,
        num_key_value_heads: 4,
        ..RandomCheckpoint::default()
    });
    refuses_command(
        &eight,
        &line("--drop-width 0.25 --width-of heads --save out"),
        2,
        "error: --drop-width 0.25 --width-of heads would keep 6 of 8 heads, and transformers loads only numbers of heads that divide hidden_size 64",
        "hint: use --width-of mlp, or --drop-width 0.500 for 4 heads",
    );
    refuses_command(
        &place,
        &line("--drop-width 0.3"),
        2,
        "error: --drop-width needs a run folder for the narrower matrices",
        "hint: add --save DIR; with --no-save-model no model is written",
    );
    for value in ["0", "1", "half"] {
        let ran = place.run(&line(&format!("--drop-width {value} --save out")));
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert!(ran.stderr.contains("--drop-width"), "{}", ran.stderr);
    }
}

/// Perplexities of stories260k with channels and heads dropped, refitted and not.
#[test]
fn the_refit_lowers_the_perplexity_of_stories() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let place = Place::empty();
    let run = |name: &str, more: &str| -> Result<[f64; 2]> {
        let model = shared.join("models/stories260k");
        let text = |name: &str| dataset(&shared, name);
        let line = format!(
            "--model {} --dataset {} --eval-dataset {} --nsamples 32 --seqlen 512 --eval-windows 64 --dtype f32 --eval both --save {name} {more}",
            model.display(),
            text("stories.train.txt")?,
            text("stories.test.txt")?,
        );
        let ran = place.run(&line);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let perplexity = place.manifest(name).perplexity;
        let [dense, pruned] =
            [perplexity.dense, perplexity.pruned].map(|one| one.map(|of| of.perplexity));
        Ok([dense.context("both")?, pruned.context("both")?])
    };
    for (part, share) in [("mlp", 0.2), ("heads", 0.5), ("both", 0.5)] {
        let flags = format!("--width-of {part} --drop-width {share}");
        let [dense, refitted] = run(&format!("{part}-refit"), &flags)?;
        let [_, plain] = run(part, &format!("{flags} --no-width-refit"))?;
        assert!(dense < refitted && refitted < plain, "{part}: {dense} {refitted} {plain}");
    }
    loads_in_candle(&place.path("mlp-refit/model"))
}

/// A file of FLAP's goldens.
fn golden_file(shared: &Path, name: &str) -> std::path::PathBuf {
    shared.join("goldens/methods/flap").join(name)
}
