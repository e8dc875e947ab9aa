//! Refusals before a run. Each test checks the first line, the hint, the exit code, and that nothing is written.

mod damage;
mod mistakes;
mod model;
mod output;
mod streams;
mod texts;

use std::fs;

use serde_json::Value;

use crate::support::{Place, arguments, edit_json, refuses, refuses_command, rewrite};

/// As [`refuses`], and the error is the first line.
#[track_caller]
fn refuses_at_once(place: &Place, more: &str, code: i32, first: &str, hint: &str) {
    let ran = refuses(place, more, code, first, hint);
    assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
}

/// Changes `m/config.json`.
fn edit_config(place: &Place, change: impl FnOnce(&mut Value)) {
    edit_json(&place.path("m/config.json"), change);
}

const LAYOUT_HINT: &str =
    "hint: name a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json";
const TOGETHER_HINT: &str =
    "hint: check that config.json and the weights belong together, or download them again";

const LIKE_A_HALF: &str = "hint: write a fraction like 0.5, which removes half of the weights";

#[test]
fn a_ratio_out_of_range_is_refused() {
    let place = Place::new();
    let message = |ratio| {
        format!(
            "error: --sparsity-ratio is {ratio}; it is the fraction removed, from 0 up to but not including 1"
        )
    };
    for (ratio, shown, hint) in [
        ("1", "1", LIKE_A_HALF),
        ("50", "50", "hint: for 50 percent write 0.5"),
        ("nan", "NaN", LIKE_A_HALF),
        ("inf", "inf", LIKE_A_HALF),
    ] {
        refuses_at_once(&place, &format!("--sparsity-ratio {ratio}"), 2, &message(shown), hint);
    }
    for minus in ["--sparsity-ratio=-0.5", "--sparsity-ratio -0.5"] {
        refuses_at_once(&place, minus, 2, &message("-0.5"), LIKE_A_HALF);
    }
}

#[test]
fn an_offload_folder_that_cannot_be_written_is_refused_before_outputs_are_allocated() {
    let place = Place::new();
    refuses(
        &place,
        "--hidden-states disk --offload-folder test.txt",
        1,
        "error: cannot create a spill file in `test.txt`: File exists (os error 17)",
        "hint: name a folder that can be written to with --offload-folder, or use --hidden-states ram",
    );
}

#[test]
fn a_ratio_that_is_missing_is_asked_for() {
    refuses_at_once(
        &Place::new(),
        "--sparsity-ratio -",
        2,
        "error: --sparsity-ratio is missing",
        "hint: name the fraction to remove, like --sparsity-ratio 0.5 or --sparsity-type 2:4",
    );
}

#[test]
fn a_model_that_is_not_named_is_asked_for() {
    refuses_at_once(
        &Place::new(),
        "--model -",
        2,
        "error: --model is missing",
        "hint: name a checkpoint folder, like --model models/llama-2-7b; see prune --help",
    );
}

#[test]
fn a_pattern_that_does_not_divide_the_inputs_is_refused() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--sparsity-ratio - --sparsity-type 3:5",
        1,
        "error: `model.layers.0.self_attn.q_proj` has 64 input features, which 5 does not divide",
        "hint: use the pattern 2:4",
    );
    // 64 is a multiple of 32, 176 is not.
    refuses_at_once(
        &place,
        "--sparsity-ratio - --sparsity-type 16:32",
        1,
        "error: `model.layers.0.mlp.down_proj` has 176 input features, which 32 does not divide",
        "hint: use the pattern 8:16, or leave matrices out with --exclude '*down_proj'",
    );
    // Both fixes, as they are typed.
    for fix in ["8:16", "16:32 --exclude *down_proj"] {
        place.prune(&format!("--model m --eval none --sparsity-type {fix} --save out --force"));
    }
}

#[test]
fn a_pattern_that_contradicts_the_ratio_is_refused() {
    refuses_at_once(
        &Place::new(),
        "--sparsity-ratio 0.6 --sparsity-type 2:4",
        2,
        "error: --sparsity-ratio 0.6 contradicts --sparsity-type 2:4, which removes 0.5",
        "hint: leave --sparsity-ratio out, or use 0.5",
    );
}

#[test]
fn a_pattern_that_is_none_is_refused() {
    let hint = "hint: use `unstructured`, or N:M with N pruned of M, like 2:4";
    for (pattern, why) in [
        ("4:2", "N must lie between 1 and M - 1, and 4 of 2 does not"),
        ("dense", "it is neither `unstructured` nor N:M"),
        ("2:x", "`x` is not a number"),
    ] {
        refuses_at_once(
            &Place::new(),
            &format!("--sparsity-type {pattern}"),
            2,
            &format!(
                "error: invalid value '{pattern}' for '--sparsity-type <TYPE>': `{pattern}` is not a sparsity type: {why}"
            ),
            hint,
        );
    }
}

#[test]
fn a_weight_that_is_no_number_is_named_by_layer_tensor_row_and_column() {
    for (method, bits) in
        [("wanda", f32::NAN), ("magnitude", f32::NAN), ("magnitude", f32::INFINITY)]
    {
        let place = Place::new();
        rewrite(&place, |name, _, bytes| {
            if name == "model.layers.1.self_attn.v_proj.weight" {
                // Row 5, column 7 of [32, 64].
                let at = 4 * (5 * 64 + 7);
                bytes[at..at + 4].copy_from_slice(&bits.to_le_bytes());
            }
            true
        });
        let ran = place.run(&arguments(&format!("--prune-method {method} --eval none")));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        let error = &ran.stderr[ran.stderr.find("error: ").unwrap()..];
        for part in ["model.layers.1.self_attn.v_proj", "row 5", "column 7", "in model.layers.1"] {
            assert!(error.contains(part), "no `{part}`: {error}");
        }
        assert!(!error.contains("panicked"), "{error}");
        // An output that is only begun never looks finished.
        assert!(
            !place.path("out/run.json").exists() && !place.path("out/model/config.json").exists()
        );
        assert!(!place.path("out/model/model.safetensors").exists());
    }
}

#[test]
fn globs_that_are_malformed_or_match_nothing_are_refused() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--include [q",
        2,
        "error: --include `[q` is not a glob: Pattern syntax error near position 0: invalid range pattern",
        "",
    );
    refuses_at_once(
        &place,
        "--exclude lm_head",
        2,
        "error: --exclude `lm_head` matches no matrix of this model",
        "hint: names look like model.layers.0.self_attn.q_proj; try '*q_proj' or 'model.layers.[0-3].*'",
    );
    refuses_at_once(
        &place,
        "--exclude *",
        2,
        "error: --include and --exclude leave no matrix to prune",
        "hint: names look like model.layers.0.self_attn.q_proj; try --include '*q_proj'",
    );
}

#[test]
fn thread_counts_that_are_none_are_refused() {
    let place = Place::new();
    for (value, why) in [
        ("0", "0 is not in 1..=1024"),
        ("1025", "1025 is not in 1..=1024"),
        ("two", "invalid digit found in string"),
    ] {
        refuses_at_once(
            &place,
            &format!("--threads {value}"),
            2,
            &format!("error: invalid value '{value}' for '--threads <N>': {why}"),
            "",
        );
    }
}

#[test]
fn layer_ratios_that_do_not_fit_are_refused() {
    let place = Place::new();
    let hint = "hint: write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them";
    for (text, code, first, hint) in [
        (
            "3",
            1,
            "error: `r.json` does not hold layer ratios: it is neither a list nor an object",
            hint,
        ),
        (
            "[0.5, \"x\"]",
            1,
            "error: `r.json` does not hold layer ratios: \"x\" is not a number",
            hint,
        ),
        (
            "{\"a\": 0.5}",
            1,
            "error: `r.json` does not hold layer ratios: `a` is not a layer's index",
            hint,
        ),
        (
            "[0.5,",
            1,
            "error: `r.json` does not hold layer ratios: it is not JSON (EOF while parsing a value at line 1 column 5)",
            hint,
        ),
        (
            "[0.5]",
            2,
            "error: --layer-ratios has 1 ratios, the model 2 layers",
            "hint: write 2 ratios, or name some layers: {\"0\": 0.3}",
        ),
        (
            "{\"2\": 0.5}",
            2,
            "error: --layer-ratios names layer 2, the model has layers 0 to 1",
            "hint: leave layer 2 out of the file",
        ),
        (
            "[0.5, 1.0]",
            2,
            "error: the ratio of layer 1 is 1; it is the fraction removed, from 0 up to but not including 1",
            LIKE_A_HALF,
        ),
    ] {
        fs::write(place.path("r.json"), text).unwrap();
        refuses_at_once(&place, "--layer-ratios r.json", code, first, hint);
    }
    refuses_at_once(
        &place,
        "--layer-ratios nowhere.json",
        1,
        "error: cannot read layer ratios from `nowhere.json`: No such file or directory (os error 2)",
        "hint: write [0.5, 0.6, ...] with one ratio per layer, or {\"0\": 0.3, \"31\": 0.7} for some of them",
    );
    fs::write(place.path("r.json"), "[0.5, 0.5]").unwrap();
    refuses_at_once(
        &place,
        "--layer-ratios r.json --sparsity-type 2:4",
        2,
        "error: --layer-ratios cannot be combined with the 2:4 pattern",
        "",
    );
}

#[test]
fn the_variant_belongs_to_wanda_without_a_pattern() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--use-variant --prune-method magnitude",
        2,
        "error: --use-variant belongs to --prune-method wanda, and magnitude was given",
        "hint: leave --use-variant out",
    );
    refuses_at_once(
        &place,
        "--use-variant --sparsity-type 2:4",
        2,
        "error: wanda-variant has no 2:4 form: it prunes unstructured only",
        "hint: leave --sparsity-type out, or choose another --prune-method",
    );
}

#[test]
fn eval_refuses_what_prune_refuses() {
    let place = Place::new();
    refuses_command(
        &place,
        "eval --model nowhere --eval-dataset test.txt",
        1,
        "error: the model folder `nowhere` does not exist",
        LAYOUT_HINT,
    );
    refuses_command(
        &place,
        "eval --model m --eval-dataset test.txt --seqlen 600",
        2,
        "error: --seqlen 600 is longer than the model's 512 positions",
        "hint: use --seqlen 512 or less",
    );
    refuses_command(
        &place,
        "eval --model m --eval-dataset test.txt --save m",
        1,
        "error: the output folder `m` is the model's folder",
        "hint: choose another folder with --save",
    );
}

/// Writes NaN into the first element of a tensor.
fn spoil(place: &Place, tensor: &str) {
    rewrite(place, |name, _, bytes| {
        if name == tensor {
            bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        true
    });
}

#[test]
fn a_perplexity_that_is_no_number_is_a_warning_and_the_manifest_stays_readable() {
    let place = Place::new();
    spoil(&place, "lm_head.weight");
    let ran = place.run(&arguments("--eval both"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for side in ["dense", "pruned"] {
        let warning = format!(
            "warning: the {side} perplexity is not finite: the model's outputs overflow or are NaN"
        );
        assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
    }
    let report = place.manifest("out").perplexity.pruned.unwrap();
    assert!(!report.perplexity.is_finite(), "{report:?}");
}

#[test]
fn a_perplexity_that_is_no_number_misses_every_gate() {
    for tensor in ["lm_head.weight", "model.norm.weight"] {
        let place = Place::new();
        spoil(&place, tensor);
        let prune = arguments("--prune-method magnitude --max-perplexity 1e300");
        let eval = "eval --model m --eval-dataset test.txt --seqlen 64 --max-perplexity 1e300";
        for line in [prune.as_str(), eval] {
            let ran = place.run(line);
            assert_eq!(ran.code, 4, "{tensor}: {}", ran.stderr);
            let missed = "gate missed: the perplexity is not finite (--max-perplexity ";
            assert!(ran.stderr.contains(missed), "{}", ran.stderr);
        }
        let gate = place.manifest("out").gate.expect("it was asked for");
        assert!(!gate.is_met, "{tensor}");
    }
}
