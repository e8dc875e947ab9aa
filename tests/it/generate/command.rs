//! The command `prune generate`: streams, prompts, sampling flags, chat, mistakes and budgets.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use prune::bytes::ByteSize;
use prune::demo::embedded;
use prune::run::GenerationReport;
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use crate::support::{Place, Ran, edit_json, ran, refuses_command};

/// `prune generate --model m` and more.
fn generate(place: &Place, more: &str) -> Ran {
    place.run(&format!("generate --model m --use-cpu {more}"))
}

/// The same, which must succeed, as JSON.
fn report(place: &Place, more: &str) -> GenerationReport {
    let ran = generate(place, &format!("{more} --json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("one JSON object")
}

/// The embedded model as `m`, whose texts are words.
fn demo_place() -> Place {
    let place = Place::empty();
    embedded::write_model(&place.path("m")).expect("a new folder");
    place
}

#[test]
fn the_text_streams_to_standard_output_and_the_figures_to_the_other() {
    let place = demo_place();
    let more = format!("--prompt '{}' --max-tokens 12 --ignore-eos", embedded::PROMPT);
    let ran = generate(&place, &more);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let report = report(&place, &more);
    assert_eq!(ran.stdout, format!("{}\n", report.text));
    assert!(report.text.starts_with(" lives in a den"), "{}", report.text);
    assert_eq!((report.ids.len(), report.finish.as_str()), (12, "max_tokens"));
    assert_eq!((report.layers_in_memory, report.layers_streamed), (5, 0));
    assert_eq!(report.prompt, embedded::PROMPT);
    assert!(report.prompt_tokens_per_second > 0.0 && report.tokens_per_second.unwrap() > 0.0);
    let last = ran.stderr.lines().last().unwrap();
    let prompt_tokens = report.prompt_ids.len();
    assert!(
        last.starts_with(&format!("prompt {prompt_tokens} tokens "))
            && last.contains(" tokens/s, generated 12 tokens ")
            && last.contains(", finish: max_tokens"),
        "{}",
        ran.stderr
    );
    let quiet = generate(&place, &format!("{more} -q"));
    assert_eq!((quiet.stderr.as_str(), quiet.stdout), ("", ran.stdout));
}

#[test]
fn it_stops_where_the_model_says_so_and_where_its_positions_end() {
    let place = demo_place();
    let ended = report(&place, &format!("--prompt '{}'", embedded::PROMPT));
    assert_eq!(ended.finish, "eos");
    assert_eq!(ended.ids.last(), Some(&198), "eos_token_id");
    let long =
        report(&place, &format!("--prompt '{}' --ignore-eos --max-tokens 500", embedded::PROMPT));
    assert_eq!(long.finish, "positions");
    assert_eq!(long.ids.len() + long.prompt_ids.len(), 128);
    assert_eq!(long.ids[..ended.ids.len()], ended.ids);
    // A list in generation_config.json: now the first token ends it.
    edit_json(&place.path("m/generation_config.json"), |json| {
        json["eos_token_id"] = json!([198, ended.ids[0]]);
    });
    let short = report(&place, &format!("--prompt '{}'", embedded::PROMPT));
    assert_eq!((short.ids.len(), short.tokens_per_second), (1, None));
}

#[test]
fn a_prompt_comes_from_a_file_or_from_standard_input() {
    let place = Place::new();
    fs::write(place.path("p.txt"), "Grüße\n").unwrap();
    let from_file = report(&place, "--prompt-file p.txt --max-tokens 3");
    assert_eq!(from_file.prompt, "Grüße");
    assert_eq!(from_file.prompt_ids.len(), 1 + "Grüße".len(), "<s> and a token per byte");
    let mut child = place
        .command("generate --model m --prompt-file - --max-tokens 3 --json")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary was built by this test run");
    child.stdin.take().unwrap().write_all("Grüße".as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let from_input: GenerationReport = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(from_input.ids, from_file.ids);
}

#[test]
fn two_models_go_on_from_the_same_prompt() {
    let place = demo_place();
    place.checkpoint("other", &RandomCheckpoint::default());
    let more = "--prompt 'The fox' --compare other --max-tokens 5";
    let ran = generate(&place, more);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let report = report(&place, more);
    let other = report.compare.as_ref().expect("it was asked for");
    assert_eq!((report.model.as_str(), other.model.as_str()), ("m", "other"));
    assert_eq!(ran.stdout, format!("== m\n{}\n\n== other\n{}\n", report.text, other.text));
}

#[test]
fn sampling_flags_reach_the_sampler() {
    let place = demo_place();
    let hot = "--prompt 'The fox' --max-tokens 20 --temperature 2 --ignore-eos";
    let drawn = |more: &str| report(&place, &format!("{hot} {more}")).ids;
    assert_eq!(drawn(""), drawn("--seed 0"));
    assert_ne!(drawn(""), drawn("--seed 1"));
    let greedy = report(&place, "--prompt 'The fox' --max-tokens 20 --ignore-eos").ids;
    assert_eq!(drawn("--top-k 1"), greedy);
    assert_eq!(drawn("--top-p 0.000001"), greedy);
    let idle = generate(&place, "--prompt The --top-p 0.9 --max-tokens 1 -q");
    assert_eq!(
        idle.stderr,
        "warning: --top-p and --top-k have no effect at --temperature 0, which draws nothing\n"
    );
}

#[test]
fn chat_renders_the_models_template_and_adds_no_second_beginning() {
    let place = Place::new();
    edit_json(&place.path("m/tokenizer_config.json"), |json| {
        json["chat_template"] = json!(
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        );
    });
    let asked = report(&place, "--chat --prompt Hi --max-tokens 2");
    assert_eq!(asked.prompt, "<s>[user]Hi[assistant]");
    assert_eq!(asked.prompt_ids.len(), 1 + "[user]Hi[assistant]".len(), "<s> is one token");
    assert_eq!(asked.prompt_ids[0], 256);
    let told = report(&place, "--chat --system -s --prompt -p --max-tokens 2");
    assert_eq!(told.prompt, "<s>[system]-s[user]-p[assistant]");
    // As it is, without the flag.
    let plain = report(&place, "--prompt Hi --max-tokens 2");
    assert_eq!(plain.prompt, "Hi");
}

#[test]
fn a_reader_who_leaves_ends_the_writing() {
    let place = Place::with(&RandomCheckpoint {
        max_position_embeddings: 100_000,
        ..RandomCheckpoint::default()
    });
    let mut child = place
        .command("generate --model m --prompt x --ignore-eos --max-tokens 90000")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built by this test run");
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && stderr.contains("finish: stopped"), "{stderr}");
}

/// The fault, in words.
#[test]
fn mistakes_are_told_with_the_way_out() {
    let place = Place::new();
    fs::write(place.path("latin1.txt"), b"caf\xe9").unwrap();
    let refuses = |more: &str, code: i32, first: &str, hint: &str| {
        let arguments = format!("generate --model m {more}");
        refuses_command(&place, &arguments, code, first, hint);
    };
    refuses(
        "",
        2,
        "error: --prompt is missing",
        "hint: write the text that the model continues, like --prompt \"Once upon a time\", or name a --prompt-file",
    );
    refuses(
        "--prompt x --prompt-file y",
        2,
        "error: --prompt and --prompt-file are both given",
        "hint: leave one of them out",
    );
    refuses(
        "--prompt-file absent.txt",
        1,
        "error: cannot read the prompt from `absent.txt`: No such file or directory (os error 2)",
        "hint: --prompt-file wants a text file, or - for standard input",
    );
    // A sparse file of 16 MiB and a byte.
    let large = fs::File::create(place.path("large.txt")).unwrap();
    large.set_len((16 << 20) + 1).unwrap();
    for file in ["large.txt", "/dev/zero"] {
        refuses(
            &format!("--prompt-file {file}"),
            1,
            &format!(
                "error: cannot read the prompt from `{file}`: it is larger than 16.00 MiB, the most that is read of such a file"
            ),
            "hint: --prompt-file wants a text file, or - for standard input",
        );
    }
    refuses(
        "--prompt-file latin1.txt",
        1,
        "error: the prompt in `latin1.txt` is not UTF-8 from byte 3 on",
        "",
    );
    refuses(
        "--prompt x --dtype f16",
        2,
        "error: --dtype f16: prune generate computes in f32 or bf16",
        "hint: leave --dtype out, or use --dtype bf16",
    );
    refuses(
        "--prompt x --temperature -1",
        2,
        "error: invalid value '-1' for '--temperature <T>': it is 0, for the likeliest token, or more; 0.7 is a usual choice",
        "",
    );
    for given in ["0", "1.5", "-0.1", "nan"] {
        let why = "it is a probability above 0 and up to 1; 0.9 is a usual choice";
        refuses(
            &format!("--prompt x --top-p {given}"),
            2,
            &format!("error: invalid value '{given}' for '--top-p <P>': {why}"),
            "",
        );
    }
    refuses(
        "--prompt x --compare absent",
        1,
        "error: the folder of --compare, `absent`, does not exist",
        "hint: --compare wants a checkpoint like --model: config.json, *.safetensors, tokenizer.json",
    );
    refuses(
        "--prompt x --chat",
        1,
        "error: `m` has no chat template",
        "hint: leave --chat out: a model without a template was not trained for questions",
    );
    refuses(
        &format!("--prompt {}", "x".repeat(511)),
        1,
        "error: the prompt has 512 tokens, and the model 512 positions for prompt and text together",
        "hint: shorten the prompt to 511 tokens or less",
    );
    let usage = |more: &str| generate(&place, more).code;
    assert_eq!(usage("--prompt x --system y"), 2, "without --chat");
    assert_eq!(usage("--prompt x --max-tokens 0"), 2);
    assert_eq!(usage("--prompt x --top-k 0"), 2);
}

#[test]
fn a_model_that_cannot_write_is_refused_before_it_is_read() {
    let place = Place::new();
    let arguments = "generate --model m --prompt x";
    let nowhere = "generate --model nowhere --prompt x";
    refuses_command(
        &place,
        nowhere,
        1,
        "error: the model folder `nowhere` does not exist",
        "hint: name a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json",
    );
    // Without a beginning token an empty prompt has no tokens at all.
    edit_json(&place.path("m/tokenizer.json"), |json| json["post_processor"] = Value::Null);
    refuses_command(
        &place,
        "generate --model m --prompt ''",
        2,
        "error: the prompt is empty: it has no tokens",
        "hint: write a few words: --prompt \"Once upon a time\"",
    );
    fs::write(place.path("m/chat_template.jinja"), "{% for %}").unwrap();
    let broken = place.run(&format!("{arguments} --chat"));
    assert_eq!(broken.code, 1);
    assert!(
        broken
            .stderr
            .starts_with("error: the chat template of `m/chat_template.jinja` cannot be used: "),
        "{}",
        broken.stderr
    );
    fs::remove_file(place.path("m/tokenizer.json")).unwrap();
    refuses_command(
        &place,
        arguments,
        1,
        "error: no tokenizer in `m`",
        "hint: copy `tokenizer.json` and `tokenizer_config.json` from the model's page into the folder",
    );
}

#[test]
fn logits_that_are_no_numbers_are_an_error_and_no_text() {
    let place = Place::new();
    let path = place.path("m/model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    let norm = tensors["model.norm.weight"].clone();
    let broken = (norm * f64::NAN).unwrap();
    tensors.insert("model.norm.weight".to_string(), broken);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let failed = ran(&mut place.command("generate --model m --prompt x -q"));
    assert_eq!((failed.code, failed.stdout.as_str()), (1, ""));
    assert_eq!(
        failed.stderr,
        "error: the model's logits are not finite\n  that of token id 0 is NaN\n\
         hint: `prune inspect DIR` finds weights that are not finite\n"
    );
}

#[cfg(unix)]
#[test]
fn an_interrupted_text_ends_with_the_code_shells_use() {
    use std::io::Read;

    let place = Place::with(&RandomCheckpoint {
        max_position_embeddings: 100_000,
        ..RandomCheckpoint::default()
    });
    let mut child = place
        .command("generate --model m --prompt x --ignore-eos --max-tokens 90000")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built by this test run");
    let mut first = [0; 1];
    let mut text = child.stdout.take().unwrap();
    text.read_exact(&mut first).expect("it writes");
    let reading = std::thread::spawn(move || std::io::copy(&mut text, &mut std::io::sink()));
    let killed = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .expect("kill is there");
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    reading.join().unwrap().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.lines().last().unwrap().starts_with("interrupted (SIGINT)"), "{stderr}");
}

#[test]
fn a_budget_streams_layers_and_changes_no_word() {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 256,
        intermediate_size: 688,
        num_hidden_layers: 8,
        num_attention_heads: 4,
        ..RandomCheckpoint::default()
    });
    let base = "--prompt 'a sparse layer' --max-tokens 6 --ignore-eos";
    let with = |budget: &str| report(&place, &format!("{base} --max-memory {budget}"));
    let free = with("cpu=4GiB");
    assert_eq!((free.layers_in_memory, free.layers_streamed), (8, 0));
    // 3.2 MiB a layer.
    let tight = with(&format!("cpu={}KiB", (free.predicted.0 - (8 << 20)) >> 10));
    assert!(tight.layers_streamed > 0 && tight.layers_in_memory < 8, "{tight:?}");
    assert_eq!((tight.ids, tight.text), (free.ids, free.text));
    assert!(
        tight.warnings.iter().any(|warning| warning.contains("read from disk for every token"))
    );
    let refused = generate(&place, &format!("{base} --max-memory cpu=1MiB"));
    assert_eq!(refused.code, 1, "{}", refused.stderr);
    let hint = refused.stderr.lines().find_map(|line| line.strip_prefix("hint: use --max-memory "));
    let budget = hint.and_then(|hint| hint.split([',', ' ']).next()).expect("a budget to type");
    // The memory of the process differs a little between runs.
    let enough: ByteSize = budget.trim_start_matches("cpu=").parse().expect("an amount");
    let smallest = with(&format!("cpu={}MiB", (enough.0 >> 20) + 1));
    assert_eq!(smallest.layers_in_memory, 0);
}
