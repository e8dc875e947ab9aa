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
        ("ShortGPT", "tip: --drop-layers N drops layers by their block influence"),
        ("dsnot", "tip: --refine dsnot swaps weights behind a method, like --prune-method wanda"),
        ("owl", "tip: --allocate owl gives each layer its ratio, for any method"),
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
        ("evl", "error: unrecognized subcommand 'evl'", "tip: a similar subcommand exists: 'eval'"),
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
        ("--dtype fp8", "error: invalid value 'fp8' for '--dtype <DTYPE>'"),
        ("--dtype bf61", "error: invalid value 'bf61' for '--dtype <DTYPE>'"),
        ("plan --shape llama-4", "error: invalid value 'llama-4' for '--shape <NAME>'"),
        (
            "--device gpu",
            "error: invalid value 'gpu' for '--device <DEVICE>': devices are auto, cpu, cuda and cuda:N",
        ),
        (
            "--sparsity-type 2:3:4",
            "error: invalid value '2:3:4' for '--sparsity-type <TYPE>': `2:3:4` is not a sparsity type: `3:4` is not a number",
        ),
        ("eval m --foo", "error: unexpected argument '--foo' found"),
        ("foo m", "error: unrecognized subcommand 'foo'"),
        ("--model a b", "error: unrecognized subcommand 'b'"),
        ("--model x eval", "error: the subcommand 'eval' cannot be used with '--model <DIR|ID>'"),
    ] {
        let tips: Vec<String> =
            told(line, first).into_iter().filter(|told| told.starts_with("tip: ")).collect();
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
        ("--use_gpu", "tip: a build with CUDA uses all GPUs; --device cuda:0 chooses one"),
    ] {
        let first = format!("error: unexpected argument '{}' found", flag.replace('_', "-"));
        assert_eq!(told(flag, &first), [tip]);
    }
}

/// The command of the tip under a refused command line.
#[track_caller]
fn typed(place: &Place, line: &str) -> String {
    let ran = place.run(line);
    assert_eq!(ran.code, 2, "{line}\n{}", ran.stderr);
    let tips = ran.stderr.lines().map(str::trim);
    let mut typed = tips.filter_map(|line| line.strip_prefix("tip: type prune "));
    let typed = typed.next();
    typed.unwrap_or_else(|| panic!("{line}: {}", ran.stderr)).to_string()
}

#[test]
fn command_lines_of_other_programs_get_a_tip_that_works_when_it_is_typed() {
    let place = Place::new();
    let texts = "--nsamples 2 --seqlen 64 --dataset train.txt --eval none";
    for line in [
        format!("main.py --model m --prune_method wanda --sparsity_ratio 0.5 {texts}"),
        format!("python main.py --model m --prune_method magnitude --sparsity_type 2:4 {texts}"),
        format!("--model m --sparsity_ratio 50% {texts}"),
        format!(
            "--model m --prune_method DSnoT --initial_method wanda --sparsity_ratio 0.5 --max_cycle_time 50 --update_threshold 0.1 {texts}"
        ),
        format!(
            "--model m --prune_method wanda_owl --sparsity_ratio 0.5 --Lamda 0.08 --Hyper_m 5 {texts}"
        ),
        "llama.py m train.txt --sparsity 0.5 --nsamples 2 --seqlen 64 --eval none".to_string(),
        "opt.py m train.txt --prunen 2 --prunem 4 --nsamples 2 --seqlen 64 --eval none".to_string(),
        format!("prune m {texts}"),
        format!("prun m {texts}"),
        "evaluate m --eval-dataset test.txt --seqlen 64".to_string(),
        "generate --model_path m --prompt hello --max_new_tokens 2".to_string(),
        "use_pruned_model.py --model_path m --prompt hello --max_tokens 2".to_string(),
    ] {
        let typed = typed(&place, &line);
        let ran = place.run(&typed);
        assert_eq!(ran.code, 0, "{line}: {typed}\n{}", ran.stderr);
    }
}

#[test]
fn every_command_of_one_model_takes_it_as_a_word_and_as_a_flag() {
    let place = Place::new();
    for (command, more) in [
        ("eval", "--eval-dataset test.txt --seqlen 64 --eval-windows 1"),
        ("inspect", ""),
        ("plan", ""),
        ("generate", "--prompt hello --max-tokens 1"),
        ("quantize", "--to nf4 --force --save q"),
    ] {
        for model in ["m", "--model m"] {
            let ran = place.run(&format!("{command} {model} {more}"));
            assert_eq!(ran.code, 0, "{command} {model}\n{}", ran.stderr);
        }
        let ran = place.run(&format!("{command} m --model m {more}"));
        assert_eq!(ran.code, 2, "{command}\n{}", ran.stderr);
        assert!(ran.stderr.contains("two models are named"), "{}", ran.stderr);
    }
}

#[test]
fn a_model_without_its_flag_is_answered_with_the_command_to_type() {
    for (line, flagged) in [
        ("models/x", "prune --model models/x --sparsity-ratio 0.5"),
        ("models/x --sparsity_ratio 0.5", "prune --model models/x --sparsity-ratio 0.5"),
        ("--sparsity-ratio 0.5 models/x", "prune --sparsity-ratio 0.5 --model models/x"),
        ("'my model'", "prune --model 'my model' --sparsity-ratio 0.5"),
        ("models/x --drop-layers 1", "prune --model models/x --drop-layers 1"),
    ] {
        let word = if line.contains("my model") { "my model" } else { "models/x" };
        let first = format!("error: unrecognized subcommand '{word}'");
        let tip = format!("tip: a model is named by a flag: {flagged}");
        assert_eq!(told(line, &first), [tip]);
    }
}

/// Each refusal names a value or a flag to type.
#[test]
fn values_and_pairs_of_flags_that_are_refused_are_answered_with_a_fix() {
    for (line, tip) in [
        ("--model m --sparsity-ratio half", "use a value like --sparsity-ratio 0.5"),
        ("--model m --sparsity-ratio 0,5", "write the number with a point: --sparsity-ratio 0.5"),
        ("--model m --nsamples 0", "use a value like --nsamples 128"),
        ("--model m --nsamples -1", "use a value like --nsamples 128"),
        ("--model m --threads two", "use a value like --threads 4"),
        ("recover --model m --lr -1", "use a value like --lr 1e-3"),
        ("recover --model m --alpha 0", "use a value like --alpha 32"),
        ("recover --model m --steps 0", "use a value like --steps 200"),
        ("recover --model m --steps 5 --epochs 1", "leave --steps or --epochs out"),
        (
            "--model m --drop-layers 4 --layers-dropped 1,2",
            "leave --drop-layers or --layers-dropped out",
        ),
        ("--model m --no-save-model --save-model x", "leave --no-save-model or --save-model out"),
        ("--model m --seed 1 --seed 2", "give --seed once"),
        ("merge a.yml b.yml", "leave `b.yml` out"),
        ("eval a b", "leave `b` out"),
        (
            "recover --model m --how full --max-steps 20",
            "type prune recover --model m --how full --steps 20",
        ),
        ("pack", "type the command like this: prune pack out/7b/model --save out/7b-packed"),
        ("--model m --drop-rule angle", "add --drop-layers 4"),
        ("eval m --kl-positions all", "add --against DENSE"),
        ("report", "type the command like this: prune report out/llama2-7b"),
        (
            "quantize out",
            "type the command like this: prune quantize --to nf4-double out/7b/model --save out/7b-4bit",
        ),
        (
            "sweep",
            "type the command like this: prune sweep --model models/llama-2-7b --methods wanda,magnitude,ria --ratios 0.4,0.5,0.6 --types unstructured,2:4 --seeds 0,1,2 --save out/sweep",
        ),
    ] {
        let ran = Place::empty().run(line);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{line}: {}", ran.stderr);
        let tips = ran.stderr.lines().filter_map(|line| line.trim().strip_prefix("tip: "));
        assert_eq!(tips.collect::<Vec<_>>(), [tip], "{line}: {}", ran.stderr);
    }
}

#[test]
fn a_plan_refuses_flags_of_a_run_with_the_advice_to_leave_them_out() {
    for flag in ["--dataset demo", "--save out", "--drop-layers 1", "--how full"] {
        let name = flag.split(' ').next().unwrap_or_default();
        let first = format!("error: unexpected argument '{name}' found");
        let tip = format!("tip: {name} is a flag of a run, leave it out of a plan");
        assert_eq!(told(&format!("plan m {flag}"), &first), [tip]);
    }
    let first = "error: unexpected argument '--no-such-flag' found";
    assert!(told("plan m --no-such-flag", first).is_empty());
}
