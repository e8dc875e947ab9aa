//! A model's chat template: it turns a question and a system message into the text that the model was trained on.
//!
//! Templates are Jinja, written for Python: `chat_template.jinja` in the model's folder, else `chat_template` of `tokenizer_config.json`,
//! which is a string or a list of named templates with a `default`. They are rendered as in `transformers`: blocks are trimmed, strings and
//! lists have Python's methods, values are printed as Python prints them, `raise_exception` is an error, `strftime_now` the date, and the
//! special tokens of `tokenizer_config.json` are variables. `tools` and `documents` are always defined.
//!
//! | file | content |
//! | --- | --- |
//! | `clock` | the date of `strftime_now` |
//! | `marks` | the statement `{% generation %}` |
//! | `process` | a process of its own for rendering, with bounds of time and memory |
//! | `python` | values and JSON as Python prints them |
//! | `rendering` | rendering in this process |

mod clock;
mod marks;
pub mod process;
mod python;
mod rendering;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use serde_json::Value;

use super::conversation::Conversation;
use super::ordered_json::OrderedJson;
use crate::failure::Failure;
use crate::input::{cannot_read, read_settings};
pub use clock::begin_run;
pub(super) use marks::RenderedText;
use process::RenderingPlace;
pub(super) use rendering::{Beginning, PROBE};
use rendering::{Refusal, Rendered, RenderingRequest};

/// A template, and the special tokens that it may use.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    text: String,
    /// The template for conversations with tools, if the model has one of its own.
    tool_use: Option<String>,
    path: PathBuf,
    tokens: Vec<(String, OrderedJson)>,
    place: Arc<RenderingPlace>,
}

/// The special tokens that are variables of a template.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// The name of the template for conversations with tools.
const TOOL_USE: &str = "tool_use";

const OWN_PROMPT: &str =
    "leave --chat out, and write the prompt as the model was trained to see it";

impl ChatTemplate {
    /// Reads the template of a model folder.
    ///
    /// # Errors
    /// Fails when there is no template, or when a file cannot be read. The message names the files.
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
    /// Fails when a file cannot be read. The message names the file.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        let config_path = folder.join("tokenizer_config.json");
        let config: Value = match read(&config_path)? {
            Some(text) => serde_json::from_str(&text).map_err(|error| {
                Failure::new(format!("`{}` is not valid JSON: {error}", config_path.display()))
            })?,
            None => Value::Null,
        };
        let tokens = TOKENS
            .iter()
            .filter_map(|&name| {
                let token = &config[name];
                let content = token.as_str().or_else(|| token["content"].as_str())?;
                Some((name.to_owned(), OrderedJson::from(content)))
            })
            .collect();
        let path = folder.join("chat_template.jinja");
        if let Some(text) = read(&path)? {
            let tool_use = folder.join("additional_chat_templates").join(TOOL_USE);
            let tool_use = read(&tool_use.with_extension("jinja"))?;
            return Ok(Some(Self { tool_use, ..Self::new(text, path, tokens) }));
        }
        let (text, tool_use) = match &config["chat_template"] {
            Value::String(text) => (text.clone(), None),
            Value::Array(templates) => {
                (default_of(templates, &config_path)?, named(templates, TOOL_USE))
            }
            _ => return Ok(None),
        };
        Ok(Some(Self { tool_use, ..Self::new(text, config_path, tokens) }))
    }

    /// Checks that a text is a template.
    ///
    /// # Errors
    /// Fails for text that is not Jinja, or too large.
    pub fn check(text: &str) -> Result<()> {
        let path = PathBuf::from("chat_template");
        let template = Self::new(text.to_string(), path, Vec::new());
        let compiled = template.apply(&Conversation::default(), &[]);
        Ok(compiled.map(drop).map_err(|refusal| template.failure(&refusal))?)
    }

    fn new(text: String, path: PathBuf, tokens: Vec<(String, OrderedJson)>) -> Self {
        Self { text, tool_use: None, path, tokens, place: Arc::default() }
    }

    /// The template.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Renders a conversation of a system message and a user message, up to the place where the model answers.
    ///
    /// # Errors
    /// Fails when the template is too large, is not valid Jinja, takes too much time or memory, or refuses the conversation; some refuse
    /// system messages. The message names the file.
    pub fn render(&self, system: Option<&str>, user: &str) -> Result<String> {
        let system = system.map(|system| ("system", system));
        let conversation = Conversation::of(system.into_iter().chain([("user", user)]));
        let messages = conversation.messages.len();
        let whole = [Beginning { messages, is_answered: true, probed: None }];
        let rendered = self.apply(&conversation, &whole).map_err(|refusal| {
            let hint = match (system, refusal.messages) {
                (Some(_), Some(_)) => "some templates have no system message: leave --system out",
                _ => OWN_PROMPT,
            };
            self.failure(&refusal).hint(hint)
        })?;
        let text = rendered.into_iter().flatten().next();
        Ok(text.map(|rendered| rendered.text).unwrap_or_default())
    }

    /// Returns whether the template marks the text that the model writes.
    pub(super) fn has_marks(&self, conversation: &Conversation) -> bool {
        marks::are_in(self.template_for(conversation))
    }

    /// Renders beginnings of a conversation, in order. A beginning after the first is `None` if the template refuses it.
    ///
    /// # Errors
    /// Fails when the template is too large, is not valid Jinja, takes too much time or memory, or refuses the first beginning. The
    /// message names the template's file, a detail the beginning.
    pub(super) fn render_beginnings(
        &self,
        conversation: &Conversation,
        beginnings: &[Beginning],
    ) -> Result<Vec<Option<RenderedText>>> {
        let all = conversation.messages.len();
        Ok(self.apply(conversation, beginnings).map_err(|refusal| {
            let failure = self.failure(&refusal);
            let Some(count) = refusal.messages else {
                return failure.hint("copy the template from the model's page again");
            };
            let first = conversation.messages.iter().take(count);
            let hint = match first.enumerate().find(|(_, of)| of.get("content").is_none()) {
                // Templates that were not made for tool calls add the content to a text.
                Some((index, _)) => format!(
                    "write \"content\": \"\" in message {}, or name a model whose template knows tool calls",
                    index + 1
                ),
                None => "change the conversation as the template asks, or leave it out".to_owned(),
            };
            failure
                .detail(format!("it was rendering the first {count} of {all} messages"))
                .hint(hint)
        })?)
    }

    /// The template for a conversation: with tools its own, if the model has one, as in `transformers`.
    fn template_for(&self, conversation: &Conversation) -> &str {
        let has_tools = conversation.variables.iter().any(|(name, _)| name == "tools");
        self.tool_use.as_deref().filter(|_| has_tools).unwrap_or(&self.text)
    }

    fn apply(&self, conversation: &Conversation, beginnings: &[Beginning]) -> Rendered {
        self.place.render(&RenderingRequest {
            template: self.template_for(conversation).to_owned(),
            variables: [&self.tokens[..], &conversation.variables].concat(),
            moment: clock::moment(),
            messages: conversation.messages.clone(),
            beginnings: beginnings.to_vec(),
        })
    }

    fn failure(&self, Refusal { why, place, .. }: &Refusal) -> Failure {
        let failure = Failure::new(format!(
            "the chat template of `{}` cannot be used: {why}",
            self.path.display()
        ));
        match place {
            Some(place) => failure.detail(place),
            None => failure,
        }
    }
}

/// A template of a list, by its name.
fn named(templates: &[Value], name: &str) -> Option<String> {
    let found = templates.iter().find(|template| template["name"] == name)?;
    found["template"].as_str().map(str::to_owned)
}

/// The template named `default` in a list.
fn default_of(templates: &[Value], path: &Path) -> Result<String> {
    Ok(named(templates, "default").ok_or_else(|| {
        let names: Vec<&str> =
            templates.iter().filter_map(|template| template["name"].as_str()).collect();
        Failure::new(format!("`{}` names no chat template `default`", path.display()))
            .detail(format!("there are: {}", names.join(", ")))
            .hint("put the one to use into `chat_template.jinja` beside it")
    })?)
}

fn read(path: &Path) -> Result<Option<String>> {
    match read_settings(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(cannot_read(path, &error).into()),
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
            fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
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
        // Llama 3's way: a loop, Python's strip and slices, the tokens' names, a date only if `strftime_now` is defined.
        let template = "{{- bos_token }}\n{%- if strftime_now is defined %}\n{{ strftime_now('%Y') | length }}\n{%- endif %}\n\
            {%- if messages[0]['role'] == 'system' %}\n    {%- set said = messages[0]['content'].strip() %}\n    \
            {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set said = '' %}\n{%- endif %}\n[{{ said }}]\n\
            {% for message in messages %}\n{{- '<|' + message.role + '|>' + message['content'] | trim + eos_token }}\n{% endfor %}\n\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let config = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        let folder = folder(Some(config), None);
        let chat = ChatTemplate::load(folder.path()).unwrap();
        assert_eq!(
            chat.render(Some(" be brief "), " Hi? ").unwrap(),
            "<s>4[be brief]\n<|user|>Hi?</s>\n<|assistant|>"
        );
        assert_eq!(chat.render(None, "Hi?").unwrap(), "<s>4[]\n<|user|>Hi?</s>\n<|assistant|>");
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
        assert!(failure.message.ends_with("names no chat template `default`"));
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
            refused.message.ends_with("cannot be used: System role not supported"),
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
            refused.message.ends_with("it has 585.94 KiB, the limit is 128.00 KiB"),
            "{refused}"
        );
        // The longest chains of each kind that the limit lets in. Some are too many steps, none may end the program.
        let most = rendering::LARGEST.0 as usize - 100;
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
