//! Input that `prune recover` refuses: the error says what is wrong, and what to type instead. Nothing is written.

use prune::adapter::Adapter;
use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;

use super::{COMMON, pruned};
use crate::support::Place;

/// The error of a command.
fn refused(place: &Place, line: &str, code: i32, says: &[&str]) {
    let ran = place.run(line);
    assert_eq!(ran.code, code, "{line}: {}", ran.stderr);
    for text in says {
        assert!(ran.stderr.contains(text), "{line}\n{}\nhas no `{text}`", ran.stderr);
    }
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
}

#[test]
fn contradictions_and_impossible_settings_name_a_flag_that_helps() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    place.checkpoint(
        "other",
        &RandomCheckpoint { num_hidden_layers: 3, ..RandomCheckpoint::default() },
    );
    let cases: [(&str, &[&str]); 17] = [
        ("--how blocks", &["needs the dense model", "--teacher DENSE"]),
        (
            "--how lora --distill-weight 0.5",
            &["--distill-weight of --how lora", "add --teacher DENSE"],
        ),
        (
            "--how full --base-quant nf4",
            &["--base-quant needs a base that stays frozen", "--how lora"],
        ),
        ("--how lora --rank 65", &["--rank 65 is above the rank of", "use --rank"]),
        ("--how lora --target-modules q_proj,qkv", &["no `qkv`", "q_proj,k_proj"]),
        (
            "--how lora --lora-dropout 0.1",
            &["--lora-dropout 0.1 is not possible", "leave --lora-dropout out"],
        ),
        ("--how full --dtype f16", &["f16", "--dtype bf16"]),
        ("--how full --optim adam", &["no optimizer `adam`", "paged-adamw8bit"]),
        (
            "--how full --optim galore_adamw",
            &["`galore_adamw` of transformers' Trainer", "--optim adamw8bit"],
        ),
        (
            "--how lora --optim paged_lion_32bit",
            &["`paged_lion_32bit`", "--optim paged-adamw32bit"],
        ),
        ("--how full --patience 3 --held-out 0", &["--patience needs held-out examples"]),
        ("--how full --train factors", &["--train is a choice of --how blocks"]),
        ("--how full --save-adapter", &["--save-adapter needs trained factors"]),
        ("--how lora --alpha 0", &["invalid value '0' for '--alpha <A>': it is no number above 0"]),
        (
            "--how full --nsamples 4 --batch-size 1",
            &[
                "--nsamples 4 is too small: 9 examples",
                "8 are held out",
                "--nsamples 9, or --held-out 3",
            ],
        ),
        (
            "--how lora --nsamples 10",
            &["12 examples", "a step takes 4", "use --nsamples 12, or --held-out 6"],
        ),
        (
            "--how full --device cuda --keep-activations 1",
            &["--keep-activations is for the CPU", "--use-cpu"],
        ),
    ];
    for (more, says) in cases {
        refused(&place, &format!("{COMMON} {more} --save out"), 2, says);
    }
    refused(
        &place,
        &format!("{COMMON} --how blocks --teacher other --save out"),
        1,
        &["has other layers than the model", "num_hidden_layers is 3 there, 2 here", "--how lora"],
    );
    refused(&place, &format!("{COMMON} --how blocks --teacher m --save m"), 1, &["error: "]);
    assert!(!place.path("out").exists());
}

#[test]
fn texts_that_are_too_short_and_trainings_that_explode_say_so() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    std::fs::write(place.path("short.txt"), "a b c d").expect("a new file");
    let short = COMMON.replace("train.txt", "short.txt");
    refused(&place, &format!("{short} --how full --save out"), 1, &["error: ", "hint: "]);
    let wild = format!("{COMMON} --lr 1e30");
    refused(
        &place,
        &format!("{wild} --how full --max-grad-norm 0 --save out"),
        1,
        &["the held-out loss is NaN", "in step 1", "leave --lr 1e30 out and add --force"],
    );
    let blocks = "--how blocks --teacher m --nsamples 16 --save blocks";
    refused(
        &place,
        &format!("{wild} {blocks}"),
        1,
        &["layer 0 are not finite in step 2", "leave --lr 1e30 out and add --force"],
    );
    let ran = place.run(&format!("{wild} {blocks} --force"));
    assert!(!ran.stderr.contains("continues the run"), "it fails again: {}", ran.stderr);
    // The hint as printed.
    let ran = place.run(&format!("{COMMON} --force {blocks}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn flags_that_a_way_does_not_read_are_warned_of_and_are_not_in_the_card() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let unused = |flags: &str| -> Vec<String> {
        let line = format!("{COMMON} {flags} --eval none --save out --force");
        let ran = place.run(&line);
        assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
        let lines = ran.stderr.lines().filter_map(|line| line.strip_prefix("warning: "));
        let names = lines.filter_map(|line| Some(line.split_once(" is not used: ")?.0.to_string()));
        names.collect()
    };
    let card = || std::fs::read_to_string(place.path("out/model/README.md")).expect("a card");
    let blocks = "--how blocks --teacher m --nsamples 16";
    assert_eq!(unused(blocks), [""; 0]);
    for flag in ["--rank", "--alpha", "--momentum"] {
        assert!(!card().contains(flag), "{}", card());
    }
    assert_eq!(unused(&format!("{blocks} --rank 8 --eval-every 2")), ["--rank", "--eval-every"]);
    assert_eq!(unused("--how full --rank 8 --alpha=4"), ["--rank", "--alpha"]);
    assert_eq!(unused("--how lora --rank 4 --momentum 0.9"), ["--momentum"]);
    assert!(card().contains("--rank 4") && !card().contains("--momentum"), "{}", card());
    assert_eq!(unused("--how full --optim sgd --lr 0.1 --momentum 0.5"), [""; 0]);
    assert!(card().contains("--momentum 0.5"), "{}", card());
}

/// Exit code 0 and "loss left NaN %" before: such a training learns nothing.
#[test]
fn a_teacher_with_the_weights_of_the_model_is_refused() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    // Another folder with other names of files is the same teacher.
    let copied = place
        .run("merge --model pruned/model --method passthrough --out-shard-size 100KB --save twice");
    assert_eq!(copied.code, 0, "{}", copied.stderr);
    for teacher in ["pruned/model", "twice/model"] {
        for how in ["blocks --nsamples 16", "full", "lora"] {
            refused(
                &place,
                &format!("{COMMON} --how {how} --teacher {teacher} --save out"),
                1,
                &["has the weights of the model", "--teacher DENSE"],
            );
        }
    }
    assert!(!place.path("out").exists());
    // A model that was recovered has other weights and the same zeros.
    let blocks = format!("{COMMON} --how blocks --nsamples 16 --eval none");
    let ran = place.run(&format!("{blocks} --teacher m --save recovered"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!ran.stderr.contains("has the zeros"), "{}", ran.stderr);
    let ran = place.run(&format!("{blocks} --teacher recovered/model --save out"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("`recovered/model` has the zeros of the model"), "{}", ran.stderr);
}

#[test]
fn names_of_the_trainers_optimizers_are_the_same_run() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let line = |optim: &str| {
        format!("{COMMON} --how lora --rank 4 --eval none --optim {optim} --save out")
    };
    assert!(place.with_fault(&line("paged_adamw_8bit"), "kill:24").is_none());
    let ran = place.run(&line("paged-adamw8bit"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(place.manifest("out").recovery.expect("a training").optim, "paged-adamw8bit");
}

#[test]
fn a_quantised_checkpoint_is_trained_as_an_adapter_only() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let ran = place.run("quantize --to nf4 pruned/model --save four");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let line = COMMON.replace("pruned/model", "four");
    refused(
        &place,
        &format!("{line} --how lora --save out"),
        2,
        &["quantised to 4 bits", "--save-adapter --no-save-model"],
    );
    let alone = "--how lora --rank 4 --lr 3e-3 --save-adapter --no-save-model --save out";
    refused(
        &place,
        &format!("{line} {alone} --base-quant nf4"),
        2,
        &["quantised to 4 bits", "without --base-quant"],
    );
    let ran = place.run(&format!("{line} {alone}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let adapter = Adapter::open(&place.path("out/adapter")).expect("an adapter");
    assert_eq!(adapter.changed().count(), 14);
    let base = place.path("four").canonicalize().expect("a folder");
    assert_eq!(adapter.base_model_name(), base.to_str());
    assert!(!place.path("out/model").exists());
}
