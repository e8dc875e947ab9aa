//! Misspelt and unknown words on the command line. A proposal has the meaning of what was typed, or there is none.

use crate::support::Place;

/// The message below the first line: possible values and tips.
#[track_caller]
fn told(line: &str, first: &str) -> Vec<String> {
    let ran = Place::empty().run(line);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{}", ran.stderr);
    let mut lines = ran.stderr.lines().map(str::trim);
    assert_eq!(lines.next(), Some(first), "{}", ran.stderr);
    lines
        .filter(|line| line.starts_with("tip: ") || line.starts_with("[possible"))
        .map(str::to_owned)
        .collect()
}

const METHODS: &str =
    "[possible values: wanda, wanda-variant, magnitude, ria, ria-per-row, sparsegpt, alps, ladder]";

#[test]
fn methods_of_the_field_that_do_not_exist_here_are_named_so() {
    for method in ["admm", "ADMM", "flap", "besa"] {
        let line = format!("--model m --prune-method {method}");
        let first = format!("error: invalid value '{method}' for '--prune-method <METHOD>'");
        let tip = "tip: this method does not exist in this version; the possible values are all there are";
        assert_eq!(told(&line, &first), [METHODS, tip]);
    }
}

#[test]
fn a_method_that_is_a_flag_is_answered_with_the_flag() {
    for (method, tip) in [
        (
            "ShortGPT",
            "tip: --drop-layers N drops layers by their block influence",
        ),
        (
            "dsnot",
            "tip: --refine dsnot swaps weights behind a method, like --prune-method wanda",
        ),
        (
            "owl",
            "tip: --allocate owl gives each layer its ratio, for any method",
        ),
    ] {
        let first = format!("error: invalid value '{method}' for '--prune-method <METHOD>'");
        let line = format!("--model m --prune-method {method}");
        assert_eq!(told(&line, &first), [METHODS, tip]);
    }
}

#[test]
fn a_plain_misspelling_is_corrected() {
    for (line, first, tip) in [
        (
            "--prune-method wnda",
            "error: invalid value 'wnda' for '--prune-method <METHOD>'",
            "tip: a similar value exists: 'wanda'",
        ),
        (
            "--prune-method WANDA",
            "error: invalid value 'WANDA' for '--prune-method <METHOD>'",
            "tip: a similar value exists: 'wanda'",
        ),
        (
            "plan --shape llama3.1-8b",
            "error: invalid value 'llama3.1-8b' for '--shape <NAME>'",
            "tip: a similar value exists: 'llama-3.1-8b'",
        ),
        (
            "--hidden-states rm",
            "error: invalid value 'rm' for '--hidden-states <WHERE>'",
            "tip: a similar value exists: 'ram'",
        ),
        (
            "--modl x",
            "error: unexpected argument '--modl' found",
            "tip: a similar argument exists: '--model'",
        ),
        (
            "--pruning_method wanda",
            "error: unexpected argument '--pruning-method' found",
            "tip: a similar argument exists: '--prune-method'",
        ),
        (
            "evl",
            "error: unrecognized subcommand 'evl'",
            "tip: a similar subcommand exists: 'eval'",
        ),
        (
            "help evl",
            "error: unrecognized subcommand 'evl'",
            "tip: a similar subcommand exists: 'eval'",
        ),
    ] {
        let told = told(line, first);
        assert_eq!(told.last().map(String::as_str), Some(tip), "{told:?}");
    }
}

#[test]
fn nothing_is_proposed_that_means_something_else() {
    for (line, first) in [
        (
            "--dtype fp8",
            "error: invalid value 'fp8' for '--dtype <DTYPE>'",
        ),
        (
            "--dtype bf61",
            "error: invalid value 'bf61' for '--dtype <DTYPE>'",
        ),
        (
            "plan --shape llama-4",
            "error: invalid value 'llama-4' for '--shape <NAME>'",
        ),
        (
            "--device gpu",
            "error: invalid value 'gpu' for '--device <DEVICE>': devices are auto, cpu, cuda and cuda:N",
        ),
        (
            "--sparsity-type 2:3:4",
            "error: invalid value '2:3:4' for '--sparsity-type <TYPE>': `2:3:4` is not a sparsity type: `3:4` is not a number",
        ),
        ("eval m --foo", "error: unexpected argument '--foo' found"),
        ("eval a b", "error: unexpected argument 'b' found"),
        ("--model a b", "error: unrecognized subcommand 'b'"),
        (
            "--model x eval",
            "error: the subcommand 'eval' cannot be used with '--model <DIR|ID>'",
        ),
    ] {
        let tips: Vec<String> = told(line, first)
            .into_iter()
            .filter(|told| told.starts_with("tip: "))
            .collect();
        assert!(tips.is_empty(), "{line}: {tips:?}");
    }
}

#[test]
fn flags_of_other_programs_are_answered_with_those_of_this_one() {
    for (flag, tip) in [
        (
            "--sparsity",
            "tip: --sparsity-ratio takes a fraction like 0.5, --sparsity-type a pattern like 2:4",
        ),
        (
            "--use_gpu",
            "tip: a build with CUDA uses all GPUs; --device cuda:0 chooses one",
        ),
        (
            "--eval_zero_shot",
            "tip: this version measures perplexity only; load the pruned model in an evaluation harness",
        ),
    ] {
        let first = format!(
            "error: unexpected argument '{}' found",
            flag.replace('_', "-")
        );
        assert_eq!(told(flag, &first), [tip]);
    }
}

#[test]
fn a_model_without_its_flag_is_answered_with_the_command_to_type() {
    for (line, flagged) in [
        ("models/x", "prune --model models/x"),
        (
            "models/x --sparsity_ratio 0.5",
            "prune --model models/x --sparsity-ratio 0.5",
        ),
        (
            "--sparsity-ratio 0.5 models/x",
            "prune --sparsity-ratio 0.5 --model models/x",
        ),
        ("'my model'", "prune --model 'my model'"),
    ] {
        let word = if line.contains("my model") {
            "my model"
        } else {
            "models/x"
        };
        let first = format!("error: unrecognized subcommand '{word}'");
        let tip = format!("tip: a model is named by a flag: {flagged}");
        assert_eq!(told(line, &first), [tip]);
    }
}
