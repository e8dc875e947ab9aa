//! A model's chat template: it turns a question and a system message into the text that the model was trained on.
//!
//! Templates are Jinja, written for Python: `chat_template.jinja` in the model's folder, else `chat_template` of `tokenizer_config.json`,
//! which is a string or a list of named templates with a `default`. They are rendered as in `transformers`: blocks are trimmed, strings and
//! lists have Python's methods, `raise_exception` is an error, and the special tokens of `tokenizer_config.json` are variables. The date of
//! the day is not given, so a question makes the same text every day; templates that use the date contain a default for it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result};
use minijinja::{Environment, Value as Jinja, context};
use serde_json::{Map, Value};

use crate::bytes::{ByteSize, read_settings};
use crate::failure::{Failure, blaming};

/// A template, and the special tokens that it may use.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    text: String,
    path: PathBuf,
    tokens: Map<String, Value>,
}

/// The special tokens that are variables of a template.
const TOKENS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// The largest template. Published templates have up to 30 KB.
const LARGEST: ByteSize = ByteSize(128 << 10);
/// Steps of a template at most. Published templates take thousands; a template without an end is refused.
const FUEL: u64 = 1_000_000;
/// Stack of the thread that renders. The library follows chains and nested values by recursion. The longest chain of a template of
/// this size (`x()()()…`) needs between 128 and 256 MiB without optimization. Only the part in use takes memory.
const STACK: usize = 512 << 20;
const OWN_PROMPT: &str =
    "leave --chat out, and write the prompt as the model was trained to see it";

impl ChatTemplate {
    /// Reads the template of a model folder.
    ///
    /// # Errors
    /// Fails when there is no template, or when one of the files cannot be read. The message names the files.
    pub fn load(folder: &Path) -> Result<Self> {
        let found = Self::find(folder)?;
        Ok(found.ok_or_else(|| {
            Failure::new(format!(
                "`{}` has no chat template",
                folder.display()
            ))
            .detail("looked for `chat_template.jinja`, and for `chat_template` in `tokenizer_config.json`")
            .hint("leave --chat out: a model without a template was not trained for questions")
        })?)
    }

    /// Reads the template of a model folder; `None` if there is none.
    ///
    /// # Errors
    /// Fails when one of the files cannot be read. The message names it.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        let config_path = folder.join("tokenizer_config.json");
        let config: Value = match read(&config_path)? {
            Some(text) => serde_json::from_str(&text).map_err(|error| {
                Failure::new(format!(
                    "`{}` is not valid JSON: {error}",
                    config_path.display()
                ))
            })?,
            None => Value::Null,
        };
        let tokens = TOKENS
            .iter()
            .filter_map(|&name| {
                let token = &config[name];
                let content = token.as_str().or_else(|| token["content"].as_str())?;
                Some((name.to_owned(), Value::from(content)))
            })
            .collect();
        let path = folder.join("chat_template.jinja");
        if let Some(text) = read(&path)? {
            return Ok(Some(Self { text, path, tokens }));
        }
        let text = match &config["chat_template"] {
            Value::String(text) => text.clone(),
            Value::Array(named) => default_of(named, &config_path)?,
            _ => return Ok(None),
        };
        Ok(Some(Self {
            text,
            path: config_path,
            tokens,
        }))
    }

    /// Checks that a text is a template.
    ///
    /// # Errors
    /// Fails for text that is not Jinja, or too large.
    pub fn check(text: &str) -> Result<()> {
        let template = Self {
            text: text.to_string(),
            path: PathBuf::from("chat_template"),
            tokens: Map::new(),
        };
        template.apply(&|template| Environment::new().add_template("chat", &template.text))
    }

    /// The template.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Renders a conversation of a system message and a user message, up to the place where the model answers.
    ///
    /// # Errors
    /// Fails when the template is too large, is not valid Jinja, or refuses the conversation; some refuse system messages. The message
    /// names the file.
    pub fn render(&self, system: Option<&str>, user: &str) -> Result<String> {
        let message = |role: &str, content: &str| context! { role, content };
        let messages: Vec<Jinja> = system
            .map(|system| message("system", system))
            .into_iter()
            .chain([message("user", user)])
            .collect();
        let rendered = self.apply(&|template| {
            let environment = template.environment()?;
            template.try_render(&environment, &messages, true)
        });
        rendered.map_err(|error| match error.downcast::<Failure>() {
            Ok(failure) if failure.hint.is_none() => {
                let hint = if system.is_some() {
                    "some templates have no system message: leave --system out"
                } else {
                    OWN_PROMPT
                };
                failure.hint(hint).into()
            }
            Ok(failure) => failure.into(),
            Err(error) => error,
        })
    }

    /// Renders beginnings of a conversation, in order. A beginning has a number of messages. If the flag is true, the place at which the
    /// model answers follows.
    ///
    /// # Errors
    /// Fails when the template is too large, is not valid Jinja, or refuses a beginning. The message names the template's file, a
    /// detail the beginning.
    pub(super) fn render_beginnings(
        &self,
        messages: &[Value],
        beginnings: &[(usize, bool)],
    ) -> Result<Vec<String>> {
        let messages: Vec<Jinja> = messages.iter().map(Jinja::from_serialize).collect();
        let refused = AtomicUsize::new(usize::MAX);
        let rendered = self.apply(&|template| {
            let environment = template.environment()?;
            let render = |&(count, is_answered): &(usize, bool)| {
                refused.store(count, Ordering::Relaxed);
                template.try_render(&environment, &messages[..count], is_answered)
            };
            beginnings.iter().map(render).collect()
        });
        rendered.map_err(|error| match error.downcast::<Failure>() {
            Ok(mut failure) => {
                failure.hint = None;
                match refused.into_inner() {
                    usize::MAX => failure,
                    count => failure.detail(format!(
                        "it was rendering the first {count} of {} messages",
                        messages.len()
                    )),
                }
                .into()
            }
            Err(error) => error,
        })
    }

    /// Calls the template library on a thread with a stack that is large enough for any template.
    fn apply<T: Send>(
        &self,
        work: &(dyn Fn(&Self) -> Result<T, minijinja::Error> + Sync),
    ) -> Result<T> {
        let unusable = |why: &str| {
            let path = self.path.display();
            Failure::new(format!(
                "the chat template of `{path}` cannot be used: {why}"
            ))
        };
        if self.text.len() as u64 > LARGEST.0 {
            let bytes = ByteSize(self.text.len() as u64);
            let why = format!("it has {bytes}, the limit is {LARGEST}");
            return Err(unusable(&why).hint(OWN_PROMPT).into());
        }
        let panicked = unusable("the template library failed").hint(OWN_PROMPT);
        let done = thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name("chat-template".to_owned())
                .stack_size(STACK)
                .spawn_scoped(scope, || blaming(panicked, || work(self)))
                .context("cannot start the thread for the chat template")?;
            let done = thread.join();
            anyhow::Ok(done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
        })?;
        done.map_err(|error| {
            let failure = unusable(error.detail().unwrap_or("the reason is not stated"));
            match error.line() {
                Some(line) => {
                    failure.detail(format!("{} in line {line} of the template", error.kind()))
                }
                None => failure,
            }
            .into()
        })
    }

    /// The template as `transformers` would compile it.
    fn environment(&self) -> Result<Environment<'_>, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", refuse);
        environment.add_template("chat", &self.text)?;
        Ok(environment)
    }

    fn try_render(
        &self,
        environment: &Environment<'_>,
        messages: &[Jinja],
        add_generation_prompt: bool,
    ) -> Result<String, minijinja::Error> {
        environment.get_template("chat")?.render(context! {
            messages,
            add_generation_prompt,
            ..Jinja::from_serialize(&self.tokens)
        })
    }
}

/// The function `raise_exception` of templates.
fn refuse(why: String) -> Result<Jinja, minijinja::Error> {
    Err(minijinja::Error::new(
        minijinja::ErrorKind::InvalidOperation,
        why,
    ))
}

/// The template named `default` in a list.
fn default_of(named: &[Value], path: &Path) -> Result<String> {
    let found = named
        .iter()
        .find(|template| template["name"] == "default")
        .and_then(|template| template["template"].as_str());
    Ok(found.map(str::to_owned).ok_or_else(|| {
        let names: Vec<&str> = named
            .iter()
            .filter_map(|template| template["name"].as_str())
            .collect();
        Failure::new(format!(
            "`{}` names no chat template `default`",
            path.display()
        ))
        .detail(format!("there are: {}", names.join(", ")))
        .hint("put the one to use into `chat_template.jinja` beside it")
    })?)
}

fn read(path: &Path) -> Result<Option<String>> {
    match read_settings(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(Failure::new(format!("cannot read `{}`: {error}", path.display())).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use serde_json::json;

    fn folder(config: Option<Value>, jinja: Option<&str>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        if let Some(config) = config {
            fs::write(
                folder.path().join("tokenizer_config.json"),
                config.to_string(),
            )
            .unwrap();
        }
        if let Some(jinja) = jinja {
            fs::write(folder.path().join("chat_template.jinja"), jinja).unwrap();
        }
        folder
    }

    fn failure(result: Result<impl Sized>) -> Failure {
        result.err().unwrap().downcast::<Failure>().unwrap()
    }

    #[test]
    fn a_template_of_the_llama_kind_is_rendered_as_python_would() {
        // Llama 3's way: a loop, Python's strip and slices, the tokens' names, a date only where one is given.
        let template = "{{- bos_token }}\n{%- if strftime_now is defined %}\n{{ strftime_now('%d') }}\n{%- endif %}\n\
            {%- if messages[0]['role'] == 'system' %}\n    {%- set said = messages[0]['content'].strip() %}\n    \
            {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set said = '' %}\n{%- endif %}\n[{{ said }}]\n\
            {% for message in messages %}\n{{- '<|' + message.role + '|>' + message['content'] | trim + eos_token }}\n{% endfor %}\n\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let config = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        let folder = folder(Some(config), None);
        let chat = ChatTemplate::load(folder.path()).unwrap();
        assert_eq!(
            chat.render(Some(" be brief "), " Hi? ").unwrap(),
            "<s>[be brief]\n<|user|>Hi?</s>\n<|assistant|>"
        );
        assert_eq!(
            chat.render(None, "Hi?").unwrap(),
            "<s>[]\n<|user|>Hi?</s>\n<|assistant|>"
        );
    }

    #[test]
    fn the_file_of_its_own_comes_first_and_the_default_of_a_list_is_taken() {
        let named = json!({"chat_template": [
            {"name": "tool_use", "template": "tool"}, {"name": "default", "template": "default {{ messages[0].content }}"}]});
        let list = folder(Some(named.clone()), None);
        let render = |folder: &tempfile::TempDir| {
            let chat = ChatTemplate::load(folder.path()).unwrap();
            chat.render(None, "x").unwrap()
        };
        assert_eq!(render(&list), "default x");
        assert_eq!(render(&folder(Some(named), Some("own"))), "own");
        assert_eq!(render(&folder(None, Some("own"))), "own");
        let other = json!({"chat_template": [{"name": "rag", "template": "r"}]});
        let failure = failure(ChatTemplate::load(folder(Some(other), None).path()));
        assert!(
            failure
                .message
                .ends_with("names no chat template `default`")
        );
        assert_eq!(failure.details, ["there are: rag"]);
    }

    #[test]
    fn a_missing_a_broken_and_a_refusing_template_are_errors_that_name_the_file() {
        for config in [None, Some(json!({"bos_token": "<s>"}))] {
            let failure = failure(ChatTemplate::load(folder(config, None).path()));
            assert!(failure.message.ends_with("has no chat template"));
        }
        let broken = folder(None, Some("{% for %}"));
        let refused = failure(ChatTemplate::load(broken.path()).unwrap().render(None, "x"));
        assert!(refused.message.contains("chat_template.jinja"), "{refused}");
        let strict = folder(
            None,
            Some(
                "{% if messages[0].role == 'system' %}\n{{ raise_exception('System role not supported') }}\n{% endif %}",
            ),
        );
        let chat = ChatTemplate::load(strict.path()).unwrap();
        let refused = failure(chat.render(Some("be brief"), "x"));
        assert!(
            refused
                .message
                .ends_with("cannot be used: System role not supported"),
            "{refused}"
        );
        assert!(refused.hint.unwrap().contains("leave --system out"));
        assert_eq!(chat.render(None, "x").unwrap(), "");
    }

    #[test]
    fn chains_and_nests_of_any_length_are_errors_and_never_overflow_the_stack() {
        let render = |template: &str| {
            let folder = folder(None, Some(template));
            ChatTemplate::load(folder.path()).unwrap().render(None, "x")
        };
        let chain = |count: usize| format!("{{{{ 1{} }}}}", "+1".repeat(count));
        assert_eq!(render(&chain(100)).unwrap(), "101");
        let refused = failure(render(&chain(300_000)));
        assert!(
            refused
                .message
                .ends_with("it has 585.94 KiB, the limit is 128.00 KiB"),
            "{refused}"
        );
        // The longest chains of each kind that the limit lets in. Some are too many steps, none may end the program.
        let most = LARGEST.0 as usize - 100;
        for (begin, link, end) in [
            ("{{ 1", "+1", " }}"),
            ("{{ ", "-", "1 }}"),
            ("{{ ", "not ", "1 }}"),
            ("{{ x", ".y", " }}"),
            ("{{ x", "[0]", " }}"),
            ("{{ x", "|e", " }}"),
            ("{{ x", "()", " }}"),
            ("{{ 1", " if 1 else 1", " }}"),
            ("{{ ", "[", " }}"),
            ("{% if 0 %}", "{%elif 0%}", "{% endif %}"),
            ("", "{%if 1%}", ""),
        ] {
            let count = (most - begin.len() - end.len()) / link.len();
            let _ = render(&format!("{begin}{}{end}", link.repeat(count)));
        }
        let nested = "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}done";
        let _ = render(nested);
    }
}
