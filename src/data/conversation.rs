//! A conversation of training data: messages for a chat template, and the variables that the template gets with them.
//!
//! The forms that data sets have become the form that `transformers` reads: the names of roles and fields of ShareGPT are replaced, text
//! parts are joined, and fields that are null are left out.

use super::ordered_json::OrderedJson;
use crate::failure::Failure;

/// Messages, and the variables of the template.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Conversation {
    /// Objects with `role`, mostly with `content`.
    pub(super) messages: Vec<OrderedJson>,
    /// `tools`, `documents` and `chat_template_kwargs` of the line.
    pub(super) variables: Vec<(String, OrderedJson)>,
    /// The first message that may be an answer; before it is a prompt.
    pub(super) answers_from: usize,
}

/// The role of the messages that loss counts on.
pub(super) const ASSISTANT: &str = "assistant";

/// The remedy for a list that is no conversation.
const MESSAGES: &str = "write messages like [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Hello\"}]";

/// Names of roles in ShareGPT, and the names that templates know.
const ROLES: [(&str, &str); 9] = [
    ("human", "user"),
    ("gpt", ASSISTANT),
    ("chatgpt", ASSISTANT),
    ("bing", ASSISTANT),
    ("bard", ASSISTANT),
    ("model", ASSISTANT),
    ("function_call", ASSISTANT),
    ("observation", "tool"),
    ("function_response", "tool"),
];

impl Conversation {
    /// A conversation of roles and contents.
    pub(super) fn of<'a>(turns: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let turns = turns.into_iter();
        let messages = turns.map(|(role, content)| message(role, content));
        Self { messages: messages.collect(), ..Self::default() }
    }

    /// The index of every answer.
    pub(super) fn answers(&self) -> impl Iterator<Item = usize> {
        let all = self.messages.iter().enumerate().skip(self.answers_from);
        all.filter(|(_, message)| {
            message.get("role").and_then(OrderedJson::as_text) == Some(ASSISTANT)
        })
        .map(|(index, _)| index)
    }

    /// The roles, each once.
    pub(super) fn roles(&self) -> Vec<String> {
        let roles = self.messages.iter().filter_map(|message| message.get("role")?.as_text());
        let mut roles: Vec<String> = roles.map(str::to_owned).collect();
        roles.sort();
        roles.dedup();
        roles
    }

    /// Adds what a line has for its template: a system message, `tools`, `documents` and `chat_template_kwargs`.
    pub(super) fn with_fields_of(mut self, line: &OrderedJson) -> Result<Self, Failure> {
        let first = self.messages.first().and_then(|message| message.get("role")?.as_text());
        if let Some(system) = line.get("system").and_then(OrderedJson::as_text)
            && first != Some("system")
            && !system.is_empty()
        {
            self.messages.insert(0, message("system", system));
            self.answers_from += usize::from(self.answers_from > 0);
        }
        for name in ["tools", "documents"] {
            match line.get(name).map(unwritten) {
                None => {}
                Some(OrderedJson::List(list)) if list.is_empty() => {}
                Some(list @ OrderedJson::List(_)) => self.variables.push((name.to_owned(), list)),
                Some(OrderedJson::Text(text)) if text.is_empty() => {}
                Some(other) => {
                    let why = format!("`{name}` is {}, not a list", other.kind());
                    return Err(Failure::new(why)
                        .hint(format!("write `{name}` as a list of objects, or leave it out")));
                }
            }
        }
        if let Some(OrderedJson::Object(fields)) = line.get("chat_template_kwargs") {
            self.variables.extend(fields.iter().cloned());
        }
        Ok(self)
    }
}

/// A message.
fn message(role: &str, content: &str) -> OrderedJson {
    let field = |name: &str, value: &str| (name.to_owned(), OrderedJson::from(value));
    OrderedJson::Object(vec![field("role", role), field("content", content)])
}

/// A list or an object that a data set keeps as a string of JSON; any further value as it is.
fn unwritten(value: &OrderedJson) -> OrderedJson {
    let written = value.as_text().filter(|text| text.trim_start().starts_with(['[', '{']));
    let parsed = written.and_then(|text| OrderedJson::parse(text.as_bytes()).ok());
    parsed.unwrap_or_else(|| value.clone())
}

/// Reads the messages of field `name`. Fails when a message has no role or no content, or a value of a wrong type.
pub(super) fn messages(value: &OrderedJson, name: &str) -> Result<Vec<OrderedJson>, Failure> {
    let OrderedJson::List(messages) = unwritten(value) else {
        let why = format!("`{name}` is {}, not a list", value.kind());
        return Err(Failure::new(why).hint(MESSAGES));
    };
    let messages = messages.into_iter().enumerate();
    messages.map(|(index, message)| read_message(message, index + 1)).collect()
}

/// Reads message `number`, counted from 1.
fn read_message(message: OrderedJson, number: usize) -> Result<OrderedJson, Failure> {
    let refused = |why: String| Failure::new(why).hint(MESSAGES);
    let OrderedJson::Object(fields) = message else {
        return Err(refused(format!("message {number} is {}, not an object", message.kind())));
    };
    let mut read = Vec::with_capacity(fields.len());
    for (name, value) in fields {
        let name = match name.as_str() {
            "from" => "role".to_owned(),
            "value" => "content".to_owned(),
            _ => name,
        };
        let value = match (name.as_str(), value) {
            // As `transformers` 5 does: templates know an absent field, and print a null one.
            (_, OrderedJson::Null) => continue,
            ("role", OrderedJson::Text(role)) => {
                let known = ROLES.iter().find(|(other, _)| *other == role);
                OrderedJson::Text(known.map_or(role, |(_, role)| (*role).to_owned()))
            }
            ("content", OrderedJson::List(parts)) => OrderedJson::Text(joined(&parts, number)?),
            ("content", OrderedJson::Text(text)) => OrderedJson::Text(text),
            ("role" | "content", other) => {
                let kind = other.kind();
                return Err(refused(format!(
                    "`{name}` of message {number} is {kind}, not a string"
                )));
            }
            (_, other) => other,
        };
        read.push((name, value));
    }
    let read = with_thoughts(OrderedJson::Object(read));
    if read.get("role").is_none() {
        return Err(refused(format!("message {number} has no `role`")));
    }
    let has_more = ["tool_calls", "function_call", "reasoning_content"];
    if read.get("content").is_none() && !has_more.iter().any(|name| read.get(name).is_some()) {
        return Err(Failure::new(format!("message {number} has no `content`"))
            .hint("write \"content\": \"\" where the message is empty, or leave the line out"));
    }
    Ok(read)
}

/// Fills `reasoning_content`, the field that templates read, from its other names, and `thinking`, as `transformers` 5 does.
fn with_thoughts(message: OrderedJson) -> OrderedJson {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let found = names.iter().find_map(|name| message.get(name).cloned());
    let (OrderedJson::Object(mut fields), Some(thoughts)) = (message.clone(), found) else {
        return message;
    };
    for name in ["reasoning_content", "thinking"] {
        if message.get(name).is_none() {
            fields.push((name.to_owned(), thoughts.clone()));
        }
    }
    OrderedJson::Object(fields)
}

/// The text of the parts of a content.
fn joined(parts: &[OrderedJson], number: usize) -> Result<String, Failure> {
    let mut text = String::new();
    for part in parts {
        let kind = part.get("type").and_then(OrderedJson::as_text).unwrap_or("text");
        match (part, part.get("text").and_then(OrderedJson::as_text)) {
            (OrderedJson::Text(part), _) => text += part,
            (_, Some(part)) if matches!(kind, "text" | "input_text" | "output_text") => {
                text += part;
            }
            _ => {
                return Err(Failure::new(format!(
                    "message {number} has a content part of type `{kind}`; parts of type `text` are read"
                ))
                .hint("leave the part or the line out"));
            }
        }
    }
    Ok(text)
}
