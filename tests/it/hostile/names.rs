//! Names made to do harm: control characters in names of tensors, files, keys and values, and paths that are not UTF-8.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use prune::synthetic::RandomCheckpoint;
use serde_json::json;

use crate::support::{Place, TEXTS, edit_json, rewrite, words};

/// Sets the title of a window, rings, colours, and turns the direction of text, by sequences of 7 and of 8 bits.
const EVIL: &str = "\u{1b}]0;pwn\u{7}\u{9b}31m\u{202e}\u{2066}x";

/// The characters of a text that a terminal acts on.
fn acted_on(text: &str) -> Vec<char> {
    let bidirectional = ['\u{61c}', '\u{200e}', '\u{200f}'];
    let is_bad = |character: &char| {
        (character.is_control() && !['\n', '\t'].contains(character))
            || bidirectional.contains(character)
            || ('\u{2028}'..='\u{202e}').contains(character)
            || ('\u{2066}'..='\u{2069}').contains(character)
    };
    text.chars().filter(is_bad).collect()
}

/// Runs a command line, whose output must be free of control characters in all forms; it must name what it was given.
#[track_caller]
fn is_plain(place: &Place, line: &[&str]) {
    for form in ["plain", "json", "bar"] {
        let mut command = place.command("");
        command.args(line);
        // A mistake in the flags is found before the form of the output counts.
        if !line.contains(&"--unknown") {
            command.args(["--progress", form]);
        }
        let output = command.output().expect("the binary");
        for (stream, bytes) in [("stdout", output.stdout), ("stderr", output.stderr)] {
            let text = String::from_utf8(bytes).expect("UTF-8");
            // Bars draw with sequences of their own.
            let bad = acted_on(&text);
            let own = |bad: &char| form == "bar" && ['\u{1b}', '\r'].contains(bad);
            assert!(
                bad.iter().all(own),
                "{form} {stream} of {line:?}: {bad:?}\n{}",
                text.escape_debug()
            );
            assert!(!text.contains("\u{1b}]0;"), "{form} {stream} of {line:?}");
        }
    }
}

#[test]
fn no_control_character_of_a_name_reaches_the_terminal() {
    let place = Place::new();
    // Names of models and keys of recipes.
    let recipes = [
        format!("merge_method: linear\nmodels:\n- model: {}\n- model: m\n", json!(EVIL)),
        format!("merge_method: {}\nmodels:\n- model: m\n", json!(EVIL)),
        format!("merge_method: linear\n{}: 1\nmodels:\n- model: m\n", json!(EVIL)),
        format!(
            "merge_method: linear\nmodels:\n- model: m\n  parameters: {{weight: {}}}\n",
            json!(EVIL)
        ),
    ];
    for (number, recipe) in recipes.iter().enumerate() {
        let name = format!("r{number}.yml");
        fs::write(place.path(&name), recipe).expect("a new file");
        is_plain(&place, &["merge", &name, "--save", "out"]);
    }
    // Names of files, of folders and of flags.
    let folder = format!("m{EVIL}");
    place.checkpoint(&folder, &RandomCheckpoint::default());
    fs::write(place.path(EVIL), words(0, 300)).expect("a new file");
    is_plain(&place, &["inspect", &folder]);
    is_plain(&place, &["eval", &folder, "--eval-dataset", EVIL, "--seqlen", "64", "--save", "o"]);
    is_plain(&place, &["report", "o", "--out", EVIL]);
    is_plain(&place, &["eval", "--model", EVIL, "--eval-dataset", EVIL]);
    is_plain(&place, &["--model", "m", "--unknown", EVIL]);
    is_plain(&place, &[&format!("--{EVIL}"), "--unknown"]);
    // Names of tensors.
    rewrite(&place, |name, _, _| !name.contains("layers.1.mlp.up_proj"));
    is_plain(&place, &["inspect", "m"]);
    let place = Place::new();
    let file = place.path("m/model.safetensors");
    let bytes = fs::read(&file).expect("a file");
    let text = String::from_utf8_lossy(&bytes[8..]).into_owned();
    let header = &text[..text.find("}}").expect("a header") + 2];
    let old = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let evil = header
        .replace("model.layers.1.mlp.up_proj.weight", &json!(EVIL).to_string().replace('"', ""));
    let evil = evil.as_bytes();
    let mut changed = (evil.len() as u64).to_le_bytes().to_vec();
    changed.extend(evil);
    changed.extend(&bytes[8 + old..]);
    fs::write(&file, changed).expect("it can be replaced");
    is_plain(&place, &["inspect", "m"]);
    is_plain(&place, &["inspect", "m", "--json"]);
    is_plain(&place, &["eval", "m", "--eval-dataset", "x"]);
    // Values of settings.
    for (name, key, value) in [
        ("config.json", "model_type", json!(EVIL)),
        ("config.json", "hidden_act", json!(EVIL)),
        ("config.json", "rope_scaling", json!({"type": EVIL, "factor": 2})),
        ("tokenizer.json", "model", json!({"type": EVIL})),
        (
            "tokenizer_config.json",
            "chat_template",
            json!(format!("{{{{ raise_exception('{EVIL}') }}}}")),
        ),
    ] {
        let place = Place::new();
        edit_json(&place.path("m").join(name), |settings| settings[key] = value);
        fs::write(place.path("text"), words(0, 300)).expect("a new file");
        is_plain(&place, &["eval", "m", "--eval-dataset", "text", "--seqlen", "64"]);
        is_plain(
            &place,
            &["generate", "--model", "m", "--chat", "--prompt", "x", "--max-tokens", "4"],
        );
    }
}

#[test]
fn a_path_that_is_not_utf8_is_refused_before_any_work() {
    let place = Place::new();
    let name = OsString::from_vec(b"o\xff".to_vec());
    fs::create_dir(place.path("").join(&name)).expect("a file system of bytes");
    fs::write(place.path("text"), words(0, 300)).expect("a new file");
    let before = place.names(".");
    for (line, flag) in [
        (TEXTS, "--save"),
        ("eval m --eval-dataset text --seqlen 64", "--save"),
        ("eval m --seqlen 64", "--eval-dataset"),
        ("eval --eval-dataset text", "--model"),
        ("eval m --eval-dataset text", "--text-cache"),
        ("--model m --sparsity-ratio 0.5", "--dataset"),
        ("--model m --sparsity-ratio 0.5", "--save-model"),
        ("--model m --sparsity-ratio 0.5", "--cache-dir"),
        ("--model m --sparsity-ratio 0.5", "--offload-folder"),
        ("--model m --sparsity-ratio 0.5", "--layer-ratios"),
        ("generate --model m --prompt x", "--compare"),
        ("generate --model m", "--prompt-file"),
        ("inspect m", "--against"),
        ("inspect", ""),
        ("merge --model m --method linear", "--save"),
        ("merge --model m --method linear --save out", "--saliency-file"),
        ("merge --save out", ""),
        ("plan", "--model"),
        ("quantize --to nf4 m", "--save"),
        ("pack m", "--save"),
        ("unpack m", "--save"),
        ("recover --model m --save out", "--teacher"),
        ("report", ""),
        ("sweep --model m", "--save"),
        ("demo", "--save"),
    ] {
        for joined in [false, true] {
            let mut command = place.command(line);
            match (flag, joined) {
                ("", _) => command.arg(&name),
                (_, false) => command.arg(flag).arg(&name),
                (_, true) => command
                    .arg(OsString::from_vec([flag.as_bytes(), b"=", name.as_bytes()].concat())),
            };
            let output = command.output().expect("the binary");
            let stderr = String::from_utf8(output.stderr).expect("UTF-8");
            assert_eq!(output.status.code(), Some(2), "{line} {flag}\n{stderr}");
            assert!(stderr.contains(r"o\xff` is not UTF-8"), "{line} {flag}\n{stderr}");
            assert!(stderr.contains("hint: "), "{stderr}");
            assert_eq!(place.names("."), before, "{line} {flag}: nothing is written");
        }
    }
}

/// Relative paths work from everywhere, and so does a cache: nothing else of a run holds the folder.
#[test]
fn runs_in_a_folder_that_is_not_utf8_finish_and_continue() {
    let place = Place::new();
    fs::write(place.path("text"), words(0, 600)).expect("a new file");
    let folder = place.path("").join(OsStr::from_bytes(b"w\xff"));
    fs::create_dir(&folder).expect("a file system of bytes");
    fs::rename(place.path("m"), folder.join("m")).expect("moved");
    fs::rename(place.path("text"), folder.join("text")).expect("moved");
    let run = |line: &str, fault: &str| {
        let mut command = place.command(line);
        command.current_dir(&folder);
        if !fault.is_empty() {
            command.env("PRUNE_FAULT", fault);
        }
        command.env("PRUNE_CACHE", folder.join(OsStr::from_bytes(b"c\xff")));
        let output = command.output().expect("the binary");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let prune = "--model m --sparsity-ratio 0.5 --dataset text --nsamples 4 --seqlen 64 --eval-dataset text --eval both --save out";
    let (killed, _) = run(prune, "kill:60");
    assert_eq!(killed, None, "it is killed");
    let (code, stderr) = run(&format!("{prune} --resume"), "");
    assert_eq!(code, Some(0), "{stderr}");
    for line in [
        "eval out/model --eval-dataset text --seqlen 64 --save e",
        "merge --model m --model out/model --method linear --save merged",
        "inspect out/model --against m",
        "report out e merged --out page",
        "quantize --to nf4 m --save q",
        "pack out/model --save p",
        "unpack p --save u",
        "generate --model m --prompt x --max-tokens 4",
    ] {
        let (code, stderr) = run(line, "");
        assert_eq!(code, Some(0), "{line}\n{stderr}");
    }
    for record in ["out/run.json", "e/run.json", "merged/run.json"] {
        let text = fs::read(folder.join(record)).expect("a record");
        serde_json::from_slice::<serde_json::Value>(&text).expect("JSON");
    }
}
