//! Command lines of foreign pruning programs, in the words of this program: the tip under a command line that is refused.
//!
//! Users replace `python main.py` by `prune` and keep their flags. The tables have the flags and values of Wanda, DSnoT, OWL, SparseGPT and
//! transformers' Trainer that have a different name here. A translation is shown only if the whole command line then parses.

use std::ffi::OsString;

use super::definition::command;
use crate::pruning;

/// Words that people type for a command; "" is pruning, which needs no word.
const COMMANDS: [(&str, &str); 9] = [
    ("evaluate", "eval"),
    ("evaluation", "eval"),
    ("perplexity", "eval"),
    ("prune", ""),
    ("pruning", ""),
    ("quantise", "quantize"),
    ("train", "recover"),
    ("finetune", "recover"),
    ("chat", "generate"),
];

/// Scripts that do not prune, and the command that does their work here. All scripts not listed prune.
const SCRIPTS: [(&str, &str); 3] =
    [("use_pruned_model.py", "generate"), ("evaluate_ppl.py", "eval"), ("eval.py", "eval")];

/// Scripts of SparseGPT: their words are the model and the text.
const SCRIPTS_OF_SPARSEGPT: [&str; 3] = ["llama.py", "opt.py", "bloom.py"];

/// Flags, and the same flags here. With a value, only this value means what the program does anyway.
const FLAGS: [(&str, Option<&str>, &str); 29] = [
    ("--model-path", None, "--model"),
    ("--model-name-or-path", None, "--model"),
    ("--sparsity", None, "--sparsity-ratio"),
    ("--ratio", None, "--sparsity-ratio"),
    ("--pruning-ratio", None, "--sparsity-ratio"),
    ("--pruning-method", None, "--prune-method"),
    ("--max-cycle-time", None, "--dsnot-cycles"),
    ("--update-threshold", Some("0.1"), ""),
    ("--pow-of-var-regrowing", Some("1"), ""),
    ("--Lamda", None, "--ratio-band"),
    ("--Hyper-m", None, "--owl-outliers"),
    ("--seq-len", None, "--seqlen"),
    ("--num-samples", None, "--nsamples"),
    ("--max-new-tokens", None, "--max-tokens"),
    ("--output-dir", None, "--save"),
    ("--output", None, "--save"),
    ("--eval-dataset-path", None, "--eval-dataset"),
    ("--wbits", Some("16"), ""),
    ("--max-steps", None, "--steps"),
    ("--num-train-epochs", None, "--epochs"),
    ("--learning-rate", None, "--lr"),
    ("--warmup-steps", None, "--warmup"),
    ("--per-device-train-batch-size", None, "--batch-size"),
    ("--gradient-accumulation-steps", None, "--accumulate"),
    ("--max-seq-length", None, "--seqlen"),
    ("--eval-steps", None, "--eval-every"),
    ("--save-steps", None, "--save-every"),
    ("--lora-r", None, "--rank"),
    ("--lora-alpha", None, "--alpha"),
];

/// A flag and its value; a word has the flag "".
type Argument = (String, Option<String>);

/// The command line in the words of this program; `None` where it is not foreign, or has no such words.
///
/// # Arguments
/// * `arguments`: with the program's name, dashes in place of underscores in flags
pub(super) fn translated(arguments: &[OsString]) -> Option<Vec<String>> {
    let given: Vec<String> = arguments
        .iter()
        .skip(1)
        .map(|argument| argument.to_str().map(str::to_string))
        .collect::<Option<_>>()?;
    let mut words = given.iter().map(String::as_str).peekable();
    while words.next_if(|word| is_python(word)).is_some() {}
    let script = words.next_if(|word| word.ends_with(".py"));
    let script = script.map(|path| path.rsplit('/').next().unwrap_or(path));
    let named = match script {
        None => words.next_if(|word| COMMANDS.iter().any(|(other, _)| other == word)),
        Some(_) => None,
    };
    let is_elsewhere = script.is_some() || named.is_some();
    let of = |table: &[(&'static str, &'static str)], word: &str| {
        let found = table.iter().find(|(other, _)| *other == word);
        found.map(|(_, here)| *here)
    };
    let mut here = match (script, named) {
        (Some(script), _) => of(&SCRIPTS, script).unwrap_or_default(),
        (None, Some(word)) => of(&COMMANDS, word).unwrap_or_default(),
        (None, None) => "",
    };
    let known = command();
    let is_command = |word: &&str| known.find_subcommand(word).is_some();
    let own = words.next_if(is_command).map(str::to_string);
    if let Some(own) = &own {
        here = own;
    }
    let mut line = pairs(words);
    if script.is_some_and(|script| SCRIPTS_OF_SPARSEGPT.contains(&script)) {
        of_sparsegpt(&mut line);
    }
    flags(&mut line)?;
    methods(&mut line)?;
    if here.is_empty() && is_elsewhere {
        of_pruning(&mut line);
    }
    if here.is_empty() && !has_ratio(&line) {
        return None;
    }
    let mut all = vec!["prune".to_string()];
    all.extend((!here.is_empty()).then(|| here.to_string()));
    for (flag, value) in line {
        all.extend((!flag.is_empty()).then_some(flag));
        all.extend(value);
    }
    let is_changed = all.get(1..) != Some(&given[..]);
    (is_changed && command().try_get_matches_from(&all).is_ok()).then_some(all)
}

fn is_python(word: &str) -> bool {
    ["python", "python3"].contains(&word)
}

/// The rest of a command line as flags with their values, and words.
fn pairs<'a>(arguments: impl Iterator<Item = &'a str>) -> Vec<Argument> {
    let mut line: Vec<Argument> = Vec::new();
    for argument in arguments {
        if let Some((flag, value)) = argument.split_once('=')
            && flag.starts_with("--")
        {
            line.push((flag.to_string(), Some(value.to_string())));
        } else if argument.starts_with("--") {
            line.push((argument.to_string(), None));
        } else {
            match line.last_mut() {
                Some((flag, value @ None)) if !flag.is_empty() => {
                    *value = Some(argument.to_string());
                }
                _ => line.push((String::new(), Some(argument.to_string()))),
            }
        }
    }
    line
}

/// SparseGPT's command line: `MODEL DATASET`, N:M as two flags, magnitude pruning as a flag.
fn of_sparsegpt(line: &mut Vec<Argument>) {
    let names = ["--model", "--dataset"].into_iter();
    let words = line.iter_mut().filter(|(flag, _)| flag.is_empty());
    for ((flag, _), name) in words.zip(names) {
        *flag = name.to_string();
    }
    let magnitude = line.iter().position(|(flag, _)| flag == "--gmp");
    let method = match magnitude.map(|at| line.remove(at)) {
        Some(_) => "magnitude",
        None => "sparsegpt",
    };
    line.push(("--prune-method".to_string(), Some(method.to_string())));
    let number = |line: &[Argument], name| {
        let found = line.iter().find(|(flag, _)| flag == name);
        found.and_then(|(_, value)| value.clone())
    };
    if let (Some(n), Some(m)) = (number(line, "--prunen"), number(line, "--prunem")) {
        line.retain(|(flag, _)| flag != "--prunen" && flag != "--prunem");
        let pattern = Some(format!("{n}:{m}"));
        line.push(("--sparsity-type".to_string(), pattern));
    }
}

/// Renames flags, and writes a ratio in per cent as a fraction. `None` for a value that nothing here means.
fn flags(line: &mut Vec<Argument>) -> Option<()> {
    for (flag, value) in line.iter_mut() {
        let Some((_, only, here)) = FLAGS.iter().find(|(other, ..)| other == flag) else {
            continue;
        };
        if only.is_some() && only != &value.as_deref() {
            return None;
        }
        *flag = (*here).to_string();
        if here.is_empty() {
            *value = None;
        }
    }
    line.retain(|(flag, value)| !flag.is_empty() || value.is_some());
    for (flag, value) in line.iter_mut() {
        if flag == "--sparsity-ratio"
            && let Some(percent) = value.as_deref().and_then(|value| value.strip_suffix('%'))
        {
            let percent: f64 = percent.trim().parse().ok()?;
            *value = Some((percent / 100.0).to_string());
        }
    }
    Some(())
}

/// Writes DSnoT and OWL as a base method and a flag. `None` if the combination is not defined.
fn methods(line: &mut Vec<Argument>) -> Option<()> {
    let initial = line.iter().position(|(flag, _)| flag == "--initial-method");
    let initial = initial.and_then(|at| line.remove(at).1);
    let method = line.iter_mut().find(|(flag, _)| flag == "--prune-method");
    let Some((_, Some(method))) = method else {
        return initial.is_none().then_some(());
    };
    let lower = method.to_lowercase();
    if lower == "dsnot" {
        *method = initial.unwrap_or_else(|| "wanda".to_string());
        let first = pruning::method(method)?;
        if first.changes_weights() {
            return None;
        }
        line.push(("--refine".to_string(), Some("dsnot".to_string())));
    } else if let Some(first) = lower.strip_suffix("_owl") {
        *method = first.to_string();
        line.push(("--allocate".to_string(), Some("owl".to_string())));
    } else if lower == "owl" {
        *method = "wanda".to_string();
        line.push(("--allocate".to_string(), Some("owl".to_string())));
    }
    Some(())
}

/// A word of a pruning command is its model; a ratio has to be named.
fn of_pruning(line: &mut Vec<Argument>) {
    let words = line.iter().filter(|(flag, _)| flag.is_empty()).count();
    if words == 1 && !has(line, "--model") {
        let word = line.iter_mut().find(|(flag, _)| flag.is_empty());
        if let Some((flag, _)) = word {
            *flag = "--model".to_string();
        }
    }
    if !has_ratio(line) {
        line.push(("--sparsity-ratio".to_string(), Some("0.5".to_string())));
    }
}

fn has(line: &[Argument], name: &str) -> bool {
    line.iter().any(|(flag, _)| flag == name)
}

/// Flags that say what a pruning command removes.
const REMOVING: [&str; 6] = [
    "--sparsity-ratio",
    "--sparsity-type",
    "--layer-ratios",
    "--drop-layers",
    "--layers-dropped",
    "--drop-width",
];

/// Returns whether the words of a pruning command say what it removes.
pub(super) fn names_ratio(words: &[String]) -> bool {
    words.iter().any(|word| REMOVING.contains(&word.split('=').next().unwrap_or_default()))
}

fn has_ratio(line: &[Argument]) -> bool {
    REMOVING.iter().any(|name| has(line, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<String> {
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        translated(&arguments).map(|line| line.join(" "))
    }

    #[test]
    fn command_lines_of_other_programs_become_command_lines_here() {
        for (theirs, ours) in [
            (
                "prune main.py --model m --prune-method wanda --sparsity-ratio 0.5",
                "prune --model m --prune-method wanda --sparsity-ratio 0.5",
            ),
            (
                "prune python lib/main.py --model m --sparsity-ratio=50%",
                "prune --model m --sparsity-ratio 0.5",
            ),
            (
                "prune generate --model-path m --prompt hi --use-cpu",
                "prune generate --model m --prompt hi --use-cpu",
            ),
            (
                "prune use_pruned_model.py --model-path m --prompt hi",
                "prune generate --model m --prompt hi",
            ),
            (
                "prune --model m --prune-method DSnoT --initial-method magnitude --sparsity-ratio 0.6 --max-cycle-time 50 --update-threshold 0.1",
                "prune --model m --prune-method magnitude --sparsity-ratio 0.6 --dsnot-cycles 50 --refine dsnot",
            ),
            (
                "prune --model m --prune-method wanda_owl --sparsity-ratio 0.7 --Lamda 0.08 --Hyper-m 5 --save out",
                "prune --model m --prune-method wanda --sparsity-ratio 0.7 --ratio-band 0.08 --owl-outliers 5 --save out --allocate owl",
            ),
            (
                "prune llama.py m c4 --sparsity 0.5",
                "prune --model m --dataset c4 --sparsity-ratio 0.5 --prune-method sparsegpt",
            ),
            (
                "prune opt.py m c4 --prunen 2 --prunem 4 --gmp",
                "prune --model m --dataset c4 --prune-method magnitude --sparsity-type 2:4",
            ),
            ("prune evaluate m8", "prune eval m8"),
            (
                "prune recover --model m --how full --max-steps 20 --learning-rate=1e-3",
                "prune recover --model m --how full --steps 20 --lr 1e-3",
            ),
            ("prune prune m8", "prune --model m8 --sparsity-ratio 0.5"),
        ] {
            assert_eq!(of(theirs).as_deref(), Some(ours), "{theirs}");
        }
    }

    #[test]
    fn what_has_no_words_here_has_no_translation() {
        for line in [
            "prune --model m --prune-method wanda --sparsity-ratio 0.5",
            "prune main.py --model m --wbits 4",
            "prune --model m --prune-method DSnoT --initial-method sparsegpt --sparsity-ratio 0.6",
            "prune --model m --prune-method dsnot --update-threshold 0.3 --sparsity-ratio 0.6",
            "prune --model m --no-such-flag",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
