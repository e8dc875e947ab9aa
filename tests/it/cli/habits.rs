//! Habits that people bring from other programs: names of dtypes, the model as a word, a command without arguments.

use std::fs;

use prune::checkpoint::Checkpoint;
use prune::linalg::product::Kernel;
use safetensors::Dtype;
use serde_json::Value;

use crate::hub::parquet;
use crate::support::{Place, TEXTS, assert_snapshot, ran, refuses_command, words};

const EVAL: &str = "--eval-dataset test.txt --seqlen 64 --eval-windows 2";

#[test]
fn dtypes_have_the_names_of_pytorch_too() {
    let place = Place::new();
    for alias in ["float32", "fp32", "torch.float32"] {
        let ran = place.run(&format!("eval m {EVAL} --dtype {alias} --save {alias} --force"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert_eq!(place.manifest(alias).settings["dtype"], "f32");
    }
    for line in [
        format!("--model m --sparsity-ratio 0.5 {TEXTS} --dtype bfloat16"),
        format!("eval m {EVAL} --dtype bfloat16"),
        "plan m --dtype bfloat16".to_string(),
    ] {
        in_bf16_or_refused(&place, &line);
        let hint = "hint: use --dtype f32, or leave --dtype out";
        let line = line.replace("bfloat16", "fp16");
        let first = "error: --dtype f16 is for f16 checkpoints, and this one is f32";
        refuses_command(&place, &line, 2, first, hint);
    }
    in_bf16_or_refused(&place, "generate m --prompt a --max-tokens 3 --dtype bfloat16");
    for (alias, dtype) in [
        ("fp32", Dtype::F32),
        ("half", Dtype::F16),
        ("float16", Dtype::F16),
        ("bfloat16", Dtype::BF16),
    ] {
        let ran = place.run(&format!("make-checkpoint of-{alias} --dtype {alias}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let checkpoint = Checkpoint::open(&place.path(&format!("of-{alias}"))).unwrap();
        assert!(checkpoint.tensors().all(|entry| entry.dtype == dtype));
    }
    for alias in ["f16", "fp16", "float16", "half", "torch.float16"] {
        for command in [format!("eval of-half {EVAL}"), "plan of-half".to_string()] {
            let ran = place.run(&format!("{command} --dtype {alias}"));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
        }
    }
}

/// `--dtype bf16` computes an f32 checkpoint, too, on a CPU that multiplies bf16 faster than f32.
fn in_bf16_or_refused(place: &Place, line: &str) {
    if Kernel::best_bf16().is_some() {
        let ran = place.run(line);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        return;
    }
    let first = "error: --dtype bf16: this CPU has no bf16 products that are faster than f32's";
    refuses_command(place, line, 1, first, "hint: use --dtype f32, or leave --dtype out");
}

#[test]
fn a_model_may_be_a_word() {
    let place = Place::new();
    let stdout = |line: &str| {
        let ran = place.run(line);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stdout
    };
    assert_eq!(
        stdout("generate m --prompt a --max-tokens 5"),
        stdout("generate --model m --prompt a --max-tokens 5")
    );
    let phases = |line: &str| -> Value {
        let plan: Value = serde_json::from_str(&stdout(line)).expect("one object");
        plan["phases"].clone()
    };
    assert_eq!(phases("plan m --json"), phases("plan --model m --json"));
    let perplexity = |line: &str, save: &str| {
        let ran = place.run(&format!("eval {line} {EVAL} --save {save}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        place.manifest(save).perplexity
    };
    assert_eq!(perplexity("m", "word"), perplexity("--model m", "flag"));
}

#[test]
fn a_model_named_twice_or_not_at_all_is_asked_for() {
    let place = Place::new();
    let name = "hint: name a checkpoint folder, or an id on the hub:";
    for (command, rest, example) in [
        ("eval", EVAL, "prune eval out/7b/model"),
        ("generate", "--prompt a", "prune generate out/7b/model --prompt \"Once upon a time\""),
        (
            "plan",
            "",
            "prune plan models/llama-2-7b, or a published shape: prune plan --shape llama-2-7b",
        ),
    ] {
        let twice = format!("{command} m --model other {rest}");
        let first = "error: two models are named: `m` and --model other";
        refuses_command(&place, &twice, 2, first, "hint: leave one of them out");
        let hint = format!("{name} {example}");
        let none = format!("{command} {rest}");
        refuses_command(&place, &none, 2, "error: no model is named", &hint);
    }
}

#[test]
fn a_run_folder_in_place_of_its_model_is_answered_with_the_model() {
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.5 --eval none --save out/7b");
    for line in [
        format!("eval out/7b {EVAL}"),
        "generate out/7b --prompt a".to_string(),
        "generate m --compare out/7b --prompt a".to_string(),
        "plan out/7b".to_string(),
        format!("--model out/7b --sparsity-ratio 0.5 {TEXTS}"),
    ] {
        let first = "error: `out/7b` is a run folder";
        let hint = "hint: name its checkpoint: out/7b/model";
        refuses_command(&place, &line, 1, first, hint);
    }
}

#[test]
fn a_command_without_arguments_shows_one_screen_that_begins_with_the_demo() {
    let place = Place::empty();
    let ran = ran(place.command("").env("COLUMNS", "80"));
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""));
    assert_snapshot("newcomer.txt", &ran.stderr);
    // A prompt takes the last of 24 lines.
    assert!(ran.stderr.lines().count() < 24, "{}", ran.stderr);
    assert!(ran.stderr.lines().all(|line| line.chars().count() <= 80));
    let first = ran.stderr.lines().find(|line| line.contains("prune "));
    assert!(first.is_some_and(|line| line.ends_with(" prune demo")));
}

/// The warnings of a run that reads these two texts.
fn warnings(place: &Place, dataset: &str, evaluation: &str) -> Vec<String> {
    let ran = place.run(&format!(
        "--model m --sparsity-ratio 0.5 --dataset {dataset} --eval-dataset {evaluation} \
         --nsamples 4 --seqlen 64 --eval-windows 2 --save out --force"
    ));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let mut warnings = place.manifest("out").warnings;
    for warning in &warnings {
        let at = |text: &str| ran.stderr.find(text).expect("it is told");
        assert!(at(warning) < at("layer 0 sparsity"), "{}", ran.stderr);
    }
    // The texts of these tests are made up, so they are not the published WikiText-2.
    warnings.retain(|text| !text.contains("is not the raw test split of WikiText-2"));
    warnings
}

#[test]
fn calibration_on_the_evaluation_text_is_a_warning_however_it_is_named() {
    let place = Place::new();
    fs::create_dir(place.path("wiki")).unwrap();
    let text = |split: &str| words(split.len() as u64, 3000);
    for split in ["train", "test"] {
        fs::write(place.path(&format!("wiki/wiki.{split}.raw")), text(split)).unwrap();
    }
    fs::copy(place.path("test.txt"), place.path("copy.txt")).unwrap();
    let rows: Vec<String> = text("test").split_inclusive('\n').map(str::to_owned).collect();
    fs::write(place.path("wiki/elsewhere.parquet"), parquet(&rows)).unwrap();
    for (dataset, evaluation) in [
        ("test.txt", "test.txt"),
        ("copy.txt", "test.txt"),
        ("wikitext2:wiki/wiki.test.raw", "wikitext2:wiki"),
        ("wiki/wiki.test.raw", "wikitext2:wiki/../wiki"),
        ("wikitext2:wiki/elsewhere.parquet", "wikitext2:wiki"),
    ] {
        assert_eq!(
            warnings(&place, dataset, evaluation),
            [format!(
                "calibration (--dataset {dataset}) and evaluation (--eval-dataset {evaluation}) read the same text: the \
                 perplexity will be better than on a text that the calibration did not see; calibrate on another one, \
                 like --dataset c4"
            )]
        );
    }
}

#[test]
fn texts_that_differ_give_no_warning() {
    let place = Place::new();
    fs::create_dir(place.path("wiki")).unwrap();
    for (split, seed) in [("train", 3), ("test", 4)] {
        let text = words(seed, 3000);
        fs::write(place.path(&format!("wiki/wiki.{split}.raw")), text).unwrap();
    }
    for (dataset, evaluation) in
        [("train.txt", "test.txt"), ("wikitext2:wiki", "wikitext2:wiki"), ("demo", "demo")]
    {
        let none = Vec::<String>::new();
        assert_eq!(warnings(&place, dataset, evaluation), none);
    }
    // A method without calibration reads one text.
    let ran = place.run(
        "--model m --prune-method magnitude --sparsity-ratio 0.5 --dataset test.txt --eval-dataset test.txt \
         --seqlen 64 --eval-windows 2 --save magnitude",
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(
        place.manifest("magnitude").warnings,
        ["--dataset is not used: the method `magnitude` reads no samples"]
    );
}
