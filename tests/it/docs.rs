//! README.md and the pages in docs/ and docs/dev/: their `prune` commands run, sentences are short, links lead to something. README.md
//! names every method and every command.
//!
//! A small model stands under the names that the pages use, and a hub on the loopback has it and the texts.

use std::fs;
use std::path::{Path, PathBuf};

use prune::merging::methods as merging;
use prune::pruning::{METHODS, REFINEMENTS};
use prune::recovery::optimizers::OPTIMIZERS;
use prune::synthetic::RandomCheckpoint;
use serde_json::json;

use crate::adapters;
use crate::hub::{Server, command, parquet};
use crate::support::{Place, ran, words};

/// Words of the longest sentence.
const LONGEST_SENTENCE: usize = 40;
/// Words of the pages for users, docs/ without the generated page.
const USER_PAGES: usize = 20_600;
/// Words of the pages for those who change the code, docs/dev/.
const DEV_PAGES: usize = 15_050;
/// Lines and columns of README's first screen.
const SCREEN: (usize, usize) = (45, 100);
/// The page that `cli_page` writes.
const GENERATED: &str = "cli.md";
/// The sentence of a page with commands that no test runs; the date follows.
const BY_HAND: &str = "run by hand on 20";

/// Returns README.md and the pages, each with its path and text.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["docs", "docs/dev"].map(|name| root.join(name));
    let mut paths: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).expect("the folder is there"))
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some("md".as_ref()) && !path.ends_with(GENERATED))
        .chain([root.join("README.md")])
        .collect();
    paths.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("a page is text");
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Returns the commands in the fences of language `sh`: continued lines joined, comments cut.
fn commands(page: &str) -> Vec<String> {
    let mut commands = vec![String::new()];
    let mut language = None;
    for line in page.lines() {
        if let Some(name) = line.strip_prefix("```") {
            language = language.is_none().then_some(name);
            continue;
        }
        if language != Some("sh") {
            continue;
        }
        let line = line.split(" # ").next().unwrap_or(line).trim();
        let (line, is_continued) = match line.strip_suffix('\\') {
            Some(line) => (line.trim_end(), true),
            None => (line, false),
        };
        let last = commands.last_mut().expect("one at least");
        *last = format!("{last} {line}").trim().to_string();
        if !is_continued {
            commands.push(String::new());
        }
    }
    commands.retain(|command| !command.is_empty() && !command.starts_with('#'));
    commands
}

/// Returns the sentences of a page: of paragraphs, list items and table cells. Code is not prose.
fn sentences(page: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut is_code = false;
    for line in page.lines() {
        let text = line.trim();
        if text.starts_with("```") {
            is_code = !is_code;
            continue;
        }
        let begins =
            text.is_empty() || text.starts_with(['#', '|', '!', '<']) || text.starts_with("- ");
        if is_code || line.starts_with("    ") || begins {
            parts.push(String::new());
        }
        if is_code || line.starts_with("    ") {
            continue;
        }
        if text.starts_with('|') {
            parts.extend(text.split('|').map(String::from));
            parts.push(String::new());
            continue;
        }
        let last = parts.last_mut().expect("one at least");
        last.push(' ');
        last.push_str(text);
    }
    let ends = |part: &str| -> Vec<String> {
        let marked = part.replace(". ", ".\n").replace("? ", "?\n");
        marked.lines().map(String::from).collect()
    };
    parts.iter().flat_map(|part| ends(part)).collect()
}

/// Returns the files that relative links of a page name.
fn links(page: &str) -> Vec<&str> {
    page.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|link| link.split('#').next().unwrap_or(link))
        .filter(|link| !link.is_empty() && !link.contains("://"))
        .collect()
}

#[test]
fn sentences_are_short_and_pages_few() {
    let (mut user, mut dev) = (0, 0);
    for (path, text) in pages() {
        for sentence in sentences(&text) {
            let length = sentence.split_whitespace().count();
            assert!(length <= LONGEST_SENTENCE, "{}: {length} words: {sentence}", path.display());
        }
        let words = text.split_whitespace().count();
        match path.parent() {
            Some(folder) if folder.ends_with("docs") => user += words,
            Some(folder) if folder.ends_with("docs/dev") => dev += words,
            _ => {}
        }
    }
    assert!(user <= USER_PAGES, "docs/ has {user} words");
    assert!(dev <= DEV_PAGES, "docs/dev/ has {dev} words");
}

#[test]
fn the_first_screen_of_the_readme_ends_with_its_limits() {
    let readme = include_str!("../../README.md");
    let (first, _) = readme.split_once("\n## ").expect("a section");
    assert!(first.contains("**Honest limits**") && first.contains("cargo test"));
    assert!(first.lines().count() <= SCREEN.0, "{}", first.lines().count());
    for line in first.lines() {
        assert!(line.chars().count() <= SCREEN.1, "{line}");
    }
}

/// Capabilities that are neither a command nor a value of a table.
const CAPABILITIES: [&str; 6] = [
    "--refine",
    "--allocate owl",
    "--permute-channels",
    "--drop-layers",
    "--drop-width",
    "--sparsity-type 2:4",
];

/// The values that a flag of a command lists.
fn values(command: &str, flag: &str) -> Vec<String> {
    let cli = prune::cli::command();
    let command = cli.find_subcommand(command).expect("a command");
    let flag = command.get_arguments().find(|argument| argument.get_id() == flag);
    let values = flag.expect("a flag").get_possible_values();
    assert!(!values.is_empty());
    values.iter().map(|value| value.get_name().to_string()).collect()
}

#[test]
fn the_readme_names_every_method_and_every_command() {
    let readme = include_str!("../../README.md");
    let named = |name: &str| readme.contains(&format!("`{name}`"));
    let refinements = REFINEMENTS.iter().map(|step| format!("--refine {}", step.name()));
    let names = METHODS
        .iter()
        .map(|method| method.name().to_string())
        .chain(refinements)
        .chain(merging::METHODS.iter().map(|method| method.declaration().name.to_string()))
        .chain(OPTIMIZERS.iter().map(|kind| kind.name.to_string()))
        .chain(values("recover", "how"))
        .chain(values("quantize", "to"));
    let mut missing: Vec<String> = names.filter(|name| !named(name)).collect();
    let commands = prune::cli::command();
    for command in commands.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = command.get_name();
        // clap's own command.
        if name != "help" && !named(&format!("prune {name}")) {
            missing.push(format!("prune {name}"));
        }
    }
    missing
        .extend(CAPABILITIES.map(String::from).into_iter().filter(|name| !readme.contains(name)));
    assert!(missing.is_empty(), "README.md lacks {missing:?}");
}

#[test]
fn links_lead_to_files() {
    for (path, text) in pages() {
        let folder = path.parent().expect("a page lies in a folder");
        for link in links(&text) {
            assert!(folder.join(link).exists(), "{}: {link}", path.display());
        }
    }
}

/// The folder that the commands of a page run in, and the hub they ask.
fn staged() -> (Place, Server) {
    let shape = RandomCheckpoint {
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 4096,
        ..RandomCheckpoint::default()
    };
    let (place, server) = (Place::empty(), Server::start());
    for folder in [
        "models",
        "data/c4",
        "data/wikitext-2",
        "data/set",
        "scratch",
        "tasks/arc_easy",
        "tasks/piqa",
    ] {
        fs::create_dir_all(place.path(folder)).expect("a new folder");
    }
    for (name, seed) in [("llama-2-7b", 0), ("chat", 1), ("math", 2)] {
        place.checkpoint(&format!("models/{name}"), &RandomCheckpoint { seed, ..shape.clone() });
    }
    place.checkpoint(
        "models/llama-3-8b",
        &RandomCheckpoint { num_hidden_layers: 12, ..shape.clone() },
    );
    let lora = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]});
    let factors = adapters::pair("model.layers.0.self_attn.q_proj", 2, 32, 32);
    adapters::write_adapter(&place, "models/my-lora", &lora, &factors);
    for name in place.names("models/llama-2-7b") {
        let content = fs::read(place.path("models/llama-2-7b").join(&name)).expect("written above");
        for id in ["meta-llama/Llama-2-7b-hf", "HuggingFaceTB/SmolLM2-135M"] {
            server.add(&format!("models/{id}"), &name, content.clone());
        }
    }
    let document = |seed| json!({ "text": words(seed, 6000) }).to_string() + "\n";
    let documents = document(3) + &document(4);
    let arc = json!({"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"});
    let piqa = json!({"goal": "a", "sol1": "b", "sol2": "c", "label": 0});
    let machine = json!({ "cpu": { "memory": "64GiB", "threads": 16 } });
    for (file, content) in [
        ("data/c4/c4-train.00000-of-01024.json.gz", documents.clone()),
        ("data/wikitext-2/wiki.train.raw", words(5, 6000)),
        ("data/wikitext-2/wiki.test.raw", words(6, 6000)),
        ("data/train.jsonl", documents.clone()),
        ("data/set/train.jsonl", documents.clone()),
        ("data/heldout.txt", words(7, 6000)),
        ("tasks/arc_easy/test.jsonl", arc.to_string()),
        ("tasks/piqa/validation.jsonl", piqa.to_string()),
        ("machine.json", machine.to_string()),
        ("prompt.txt", words(8, 5)),
    ] {
        fs::write(place.path(file), content).expect("a new file");
    }
    for (split, seed) in [("train", 1), ("test", 2)] {
        let file = format!("wikitext-2-raw-v1/{split}-00000-of-00001.parquet");
        server.add("datasets/Salesforce/wikitext", &file, parquet(&[words(seed, 6000)]));
    }
    server.add("datasets/allenai/c4", "en/c4-train.00000-of-01024.json.gz", documents);
    (place, server)
}

/// Runs a command as it is written, with fewer samples; returns the message of a failure.
fn run(place: &Place, server: &Server, page: &Path, line: &str) -> Option<String> {
    let arguments = line.strip_prefix("prune ").expect("a command of prune");
    let is_pruning = arguments.starts_with("--model") || arguments.starts_with("sweep --model");
    let is_recovery = arguments.starts_with("recover");
    let writes = is_pruning
        || is_recovery
        || arguments.starts_with("merge")
        || arguments.starts_with("quantize")
        || arguments.starts_with("pack")
        || arguments.starts_with("unpack");
    // The models here are small.
    let mut arguments = arguments.replace("params 6B", "params 100k").replace("12GiB", "500KiB");
    if is_pruning && !arguments.contains("--nsamples") {
        arguments += " --nsamples 2";
    }
    if is_recovery {
        arguments += " --seqlen 64 --steps 2";
    }
    // A page shows several ways to one result.
    if writes && !arguments.contains("--resume") && arguments.contains("--save ") {
        arguments += " --force";
    }
    let ran = ran(&mut command(place, server, &arguments));
    match ran.code {
        0 => None,
        code => Some(format!("{}: {line}\n{code}: {}", page.display(), ran.stderr)),
    }
}

/// Returns the reason for leaving a command of `prune` out.
fn skipped(page: &Path, line: &str) -> Option<&'static str> {
    match line {
        _ if page.ends_with("guide.md") => Some("tests/it/guide.rs runs it"),
        _ if line.starts_with("prune demo") => Some("tests/it/demo.rs runs it"),
        _ if line.contains("--resume") => {
            Some("tests/it/resume.rs runs it: nothing is interrupted here")
        }
        _ => None,
    }
}

#[test]
fn the_commands_of_every_page_run() {
    let (place, server) = staged();
    // The results that pages speak of; the pages replace them.
    let base = "prune --model models/llama-2-7b --sparsity-ratio 0.5 --dataset data/train.jsonl --eval-dataset data/heldout.txt";
    let mut failed = Vec::new();
    for more in
        ["--save out/7b", "--save out/7b-2of4", "--prune-method magnitude --save out/7b-magnitude"]
    {
        let line = format!("{base} {more} --seqlen 256");
        failed.extend(run(&place, &server, Path::new("before"), &line));
    }
    let mut runs = 0;
    for (path, text) in pages() {
        let mut others = Vec::new();
        for line in commands(&text) {
            match skipped(&path, &line) {
                _ if !line.starts_with("prune ") => others.push(line),
                Some(why) => eprintln!("skipped: {}: `{line}`: {why}", path.display()),
                None => {
                    failed.extend(run(&place, &server, &path, &line));
                    runs += 1;
                }
            }
        }
        others.retain(|line| !line.starts_with("export "));
        if !others.is_empty() && !text.contains(BY_HAND) {
            failed.push(format!("{}: no test runs {others:?}: say `{BY_HAND}…`", path.display()));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(runs >= 30, "the pages have more commands than {runs}");
}

#[test]
fn commands_and_sentences_are_found() {
    let page = "A b. C `d. e` f:\n- g\n\n| h | i j |\n\n```sh\nprune --a \\\n  b  # c\n# d\nls\n```\n\n```text\nprune x\n```\n";
    assert_eq!(commands(page), ["prune --a b", "ls"]);
    let counts: Vec<usize> = sentences(page)
        .iter()
        .map(|sentence| sentence.split_whitespace().count())
        .filter(|&count| count > 0)
        .collect();
    assert_eq!(counts, [2, 2, 2, 2, 1, 2]);
    assert_eq!(links("[a](b.md#c) [d](#e) [f](https://g)"), ["b.md"]);
}
