//! The tokens that loss counts on, against the masks that `transformers` made (tests/loss_tokens/count.py): with the marks of a template,
//! and for the same template without marks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::data::answers::{MarkedTokens, marked_tokens};
use crate::data::chat::ChatTemplate;
use crate::data::document::Document;
use crate::data::tokenizer::Tokenizer;

/// The mask of a conversation.
#[derive(Debug, Deserialize, PartialEq)]
struct Mask {
    tokens: usize,
    /// First token and number of tokens of each run.
    loss: Vec<(usize, usize)>,
}

impl Mask {
    fn of(marked: &MarkedTokens) -> Self {
        let (mut loss, mut first) = (Vec::new(), 0);
        for run in marked.is_target.chunk_by(|one, next| one == next) {
            if run[0] {
                loss.push((first, run.len()));
            }
            first += run.len();
        }
        Self { tokens: marked.tokens.len(), loss }
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/loss_tokens")
}

fn read(name: &str) -> String {
    fs::read_to_string(folder().join(name)).unwrap()
}

/// The masks of all conversations under a template; `None` where the template refuses one.
fn masks(template: &str) -> Vec<Option<Mask>> {
    let model = tempfile::tempdir().unwrap();
    let config = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
    fs::write(model.path().join("tokenizer_config.json"), config).unwrap();
    fs::write(model.path().join("tokenizer.json"), read("tokenizer.json")).unwrap();
    fs::write(model.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = Tokenizer::load(model.path()).unwrap();
    let chat = ChatTemplate::load(model.path()).unwrap();
    let conversations: Vec<Box<serde_json::value::RawValue>> =
        serde_json::from_str(&read("conversations.json")).unwrap();
    let mask = |line: &serde_json::value::RawValue| {
        let document = Document::parse(line.get().as_bytes()).unwrap().unwrap();
        let marked = marked_tokens(&document, &tokenizer, Some(&chat));
        marked.ok().map(|marked| Mask::of(&marked))
    };
    conversations.iter().map(|line| mask(line)).collect()
}

/// The templates, by name, without the newline at the end of the file.
fn templates() -> BTreeMap<String, String> {
    let files = fs::read_dir(folder()).unwrap().flatten().map(|entry| entry.path());
    let files = files.filter(|path| path.extension().is_some_and(|ending| ending == "jinja"));
    let named = files.map(|path| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(path).unwrap();
        (name, text.strip_suffix('\n').unwrap_or(&text).to_owned())
    });
    named.collect()
}

#[test]
fn loss_counts_on_the_tokens_of_transformers_with_marks_and_without() {
    let expected: BTreeMap<String, Vec<Option<Mask>>> =
        serde_json::from_str(&read("masks.json")).unwrap();
    let templates = templates();
    assert!(expected.len() >= 8 && templates.keys().eq(expected.keys()));
    let marks = regex::Regex::new(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}").unwrap();
    let mut wrong = Vec::new();
    for (name, template) in &templates {
        let unmarked = marks.replace_all(template, "");
        for (kind, template) in [("marked", template.as_str()), ("unmarked", &unmarked)] {
            for (index, (found, expected)) in
                masks(template).iter().zip(&expected[name]).enumerate()
            {
                if found != expected {
                    wrong.push(format!("{name} {kind} {index}: {found:?}, expected {expected:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn loss_counts_on_the_completion_alone_also_where_a_prompt_has_answers() {
    let model = tempfile::tempdir().unwrap();
    fs::write(model.path().join("tokenizer.json"), read("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::load(model.path()).unwrap();
    let line = br#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}, {"role": "user", "content": "e"}], "completion": [{"role": "assistant", "content": "fg"}]}"#;
    let document = Document::parse(line).unwrap().unwrap();
    for marks in [["", ""], ["{% generation %}", "{% endgeneration %}"]] {
        let [begin, end] = marks;
        let template = format!(
            "{{% for m in messages %}}{{% if m.role == 'user' %}}<|user|>{{{{ m.content }}}}{{% else %}}<|assistant|>{begin}{{{{ m.content + '<|end|>' }}}}{end}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
        );
        fs::write(model.path().join("chat_template.jinja"), template).unwrap();
        let chat = ChatTemplate::load(model.path()).unwrap();
        let marked = marked_tokens(&document, &tokenizer, Some(&chat)).unwrap();
        // <|user|> a <|assistant|> b c d <|end|> <|user|> e <|assistant|> f g <|end|>
        assert_eq!(Mask::of(&marked), Mask { tokens: 13, loss: vec![(10, 3)] }, "{begin}");
    }
}

/// A tool call before every other message, whose place no other rendering shows, under a template that needs a first message.
#[test]
fn an_answer_that_is_not_found_leaves_the_others_their_loss() {
    let model = tempfile::tempdir().unwrap();
    fs::write(model.path().join("tokenizer.json"), read("tokenizer.json")).unwrap();
    let template = "{% if messages[0]['role'] == 'system' %}{{ '<|system|>' }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls[0].name }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    fs::write(model.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = Tokenizer::load(model.path()).unwrap();
    let chat = ChatTemplate::load(model.path()).unwrap();
    let line = br#"{"messages": [{"role": "assistant", "content": "No", "tool_calls": [{"name": "f"}]}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]}"#;
    let document = Document::parse(line).unwrap().unwrap();
    let marked = marked_tokens(&document, &tokenizer, Some(&chat)).unwrap();
    // <|assistant|> f <|end|> <|user|> a <|end|> <|assistant|> b c d <|end|>
    assert_eq!(Mask::of(&marked), Mask { tokens: 11, loss: vec![(7, 4)] });
    assert_eq!(marked.unmatched, 1);
}

/// Templates in which an answer is not where its prefix ends, with the answers that loss counts on.
#[test]
fn every_answer_has_loss_whatever_the_template_adds() {
    let turn = "{{ '<|' + m['role'] + '|>' + m['content'] }}";
    for (template, expected) in [
        // The text ends by `</s>`, also before the place of an answer.
        (
            format!(
                "{{% for m in messages %}}{turn}{{{{ '<|end|>' }}}}{{% endfor %}}{{{{ '</s>' }}}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
            ),
            ["One.<|end|>", "Two.<|end|>"],
        ),
        // Thoughts begin the place of an answer, and stay in the last answer alone.
        (
            "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
                .to_owned(),
            ["One.<|end|>", "</think>Two.<|end|>"],
        ),
        // Without a header, and without an end of the turn.
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}{{ '</s>' }}"
                .to_owned(),
            ["One.", "Two."],
        ),
    ] {
        let model = tempfile::tempdir().unwrap();
        fs::write(model.path().join("tokenizer.json"), read("tokenizer.json")).unwrap();
        fs::write(model.path().join("chat_template.jinja"), &template).unwrap();
        let tokenizer = Tokenizer::load(model.path()).unwrap();
        let chat = ChatTemplate::load(model.path()).unwrap();
        let line = br#"{"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "One."}, {"role": "user", "content": "On"}, {"role": "assistant", "content": "Two."}]}"#;
        let document = Document::parse(line).unwrap().unwrap();
        let marked = marked_tokens(&document, &tokenizer, Some(&chat)).unwrap();
        let file: serde_json::Value = serde_json::from_str(&read("tokenizer.json")).unwrap();
        // Special tokens have no text, and a byte per letter stands for itself here.
        let shown = |ids: &[u32]| -> String {
            let special = file["added_tokens"].as_array().unwrap();
            let name = |id: u32| special.iter().find(|token| token["id"] == id);
            let text = |&id: &u32| match name(id) {
                Some(token) => token["content"].as_str().unwrap().to_owned(),
                None => tokenizer.decode(&[id]).unwrap(),
            };
            ids.iter().map(text).collect()
        };
        let found: Vec<String> = Mask::of(&marked)
            .loss
            .into_iter()
            .map(|(first, count)| shown(&marked.tokens[first..first + count]))
            .collect();
        assert_eq!(found, expected, "{template}");
    }
}
