//! The command lines of the Python original's guides run unchanged, except for `python main.py`. A hub on the loopback has tiny models
//! under the published names, and WikiText-2.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use prune::synthetic::RandomCheckpoint;

use crate::hub::{Server, command, parquet};
use crate::support::{self, Place, ran, words};

/// The treatment of a command of the guides.
enum Fate {
    /// Its arguments, to be run.
    Run(Vec<String>),
    /// The reason for leaving it out.
    Skip(&'static str),
}

/// The commands in the fenced blocks of a guide, a line each: continued lines joined, comments cut.
fn commands(guide: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut is_code = false;
    let mut open = String::new();
    for line in guide.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            continue;
        }
        if !is_code {
            continue;
        }
        let line = line.split(" #").next().unwrap_or(line).trim();
        if let Some(continued) = line.strip_suffix('\\') {
            open += continued.trim();
            open.push(' ');
            continue;
        }
        open += line;
        let command = std::mem::take(&mut open);
        if command.starts_with("python ") {
            commands.push(command);
        }
    }
    commands
}

fn fate(command: &str) -> Fate {
    let Some(arguments) = command.strip_prefix("python main.py") else {
        return Fate::Skip("needs `prune generate`, which is not built yet");
    };
    let arguments: Vec<String> = arguments.split_whitespace().map(String::from).collect();
    if arguments.iter().any(|argument| argument == "...") {
        return Fate::Skip("the guide leaves some of it out");
    }
    if !arguments.iter().any(|argument| argument == "--model") {
        return Fate::Skip("the guide shows only the flag it speaks of");
    }
    Fate::Run(arguments)
}

fn value<'a>(arguments: &'a [String], flag: &str) -> Option<&'a str> {
    let at = arguments.iter().position(|argument| argument == flag)?;
    arguments.get(at + 1).map(String::as_str)
}

fn run(arguments: &[String]) {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        // Samples are as long as the model allows where a command does not say.
        max_position_embeddings: match value(arguments, "--seqlen") {
            Some(_) => 2048,
            None => 256,
        },
        ..RandomCheckpoint::default()
    });
    let server = Server::start();
    let model = value(arguments, "--model").expect("it has one");
    for name in place.names("m") {
        let content = fs::read(place.path("m").join(&name)).expect("written above");
        server.add(&format!("models/{model}"), &name, content);
    }
    for (split, seed) in [("train", 1), ("test", 2)] {
        let file = format!("wikitext-2-raw-v1/{split}-00000-of-00001.parquet");
        server.add("datasets/Salesforce/wikitext", &file, parquet(&[words(seed, 1000)]));
    }
    let ran = ran(&mut command(&place, &server, &arguments.join(" ")));
    assert_eq!(ran.code, 0, "{arguments:?}\n{}", ran.stderr);
    assert!(ran.stderr.contains("layer 0 sparsity "), "{}", ran.stderr);
    assert!(ran.stdout.contains("pruned perplexity"), "{}", ran.stdout);
    let Some(save) = value(arguments, "--save") else {
        assert!(ran.stderr.contains("nothing will be saved"), "{}", ran.stderr);
        return;
    };
    let log = fs::read_to_string(place.path(save).join("log_wanda.txt")).expect("as the original");
    assert!(log.starts_with("method\tactual_sparsity\tppl_test\nwanda\t0.5000\t"), "{log}");
    let logs_memory = arguments.iter().any(|argument| argument == "--log_memory");
    if cfg!(target_os = "linux") {
        assert_eq!(place.path(save).join("memory_log.csv").exists(), logs_memory);
    }
}

#[test]
fn the_guides_command_lines_run_unchanged_but_for_the_programs_name() {
    let Some(shared) = support::shared() else {
        return;
    };
    let mut done = BTreeSet::new();
    let mut runs = 0;
    let mut guides: Vec<_> = fs::read_dir(shared.join("origin"))
        .expect("beside the goldens")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some("md".as_ref()))
        .collect();
    guides.sort();
    for guide in guides {
        let text = fs::read_to_string(&guide).expect("a guide is text");
        let name = Path::new(guide.file_name().expect("it has one")).display().to_string();
        for command in commands(&text) {
            match fate(&command) {
                Fate::Skip(why) => eprintln!("skipped: {name}: `{command}`: {why}"),
                // Some stand in several guides.
                Fate::Run(arguments) if done.insert(arguments.clone()) => {
                    eprintln!("run: {name}: `{command}`");
                    run(&arguments);
                    runs += 1;
                }
                Fate::Run(_) => {}
            }
        }
    }
    assert!(runs >= 8, "the guides have more commands than {runs}");
}

#[test]
fn commands_are_found_in_fences_with_their_continued_lines() {
    let guide = "python main.py --no\n```bash\n# python\npython main.py --a \\\n  --b 1  # c\nls\n```\npython x\n";
    assert_eq!(commands(guide), ["python main.py --a --b 1"]);
    assert!(matches!(fate("python main.py --seqlen 9"), Fate::Skip(_)));
    assert!(matches!(fate("python main.py --model x ..."), Fate::Skip(_)));
    assert!(matches!(fate("python use.py --model x"), Fate::Skip(_)));
    assert!(matches!(fate("python main.py --model x"), Fate::Run(_)));
}
