//! A line of training data, parsed from JSON: a text, a conversation, or a prompt with its completion.
//!
//! A line must be of exactly one kind. Unknown fields are skipped, and values of a wrong type are refused, so a misspelt or half-written
//! data set is an error with its place, and is not trained on.

use serde_json::{Map, Value};

use super::documents::found_in;
use crate::failure::Failure;

/// The remedy for a line of no known form.
pub(super) const FORMS: &str = "write {\"text\": \"...\"}, {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, {\"role\": \"assistant\", \"content\": \"...\"}]} \
     or {\"prompt\": \"...\", \"completion\": \"...\"} on every line";

/// The content of a line.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TrainingLine {
    /// A text, on which all loss counts.
    Text(String),
    /// Messages with `role` and `content`, for the chat template. They are objects as the file has them, because templates may read
    /// more fields.
    Conversation(Vec<Value>),
    /// A prompt and the completion that loss counts on.
    Completion { prompt: String, completion: String },
}

impl TrainingLine {
    /// Parses a line without a mark of UTF-8 before it. The caller adds the place of the line to a failure.
    /// Fails when it is not JSON, not an object, of no kind or of several kinds, and when a value has a wrong type.
    pub(super) fn parse(line: &[u8]) -> Result<Self, Failure> {
        let refused =
            |why: String| Failure::new(format!("not a training example: {why}")).hint(FORMS);
        let value = serde_json::from_slice::<Value>(line).map_err(|error| {
            let reason = error.to_string();
            // The library counts lines within the line.
            let reason = reason.split(" at line ").next().unwrap_or_default();
            refused(format!("it is not JSON: {reason} at column {}", error.column()))
                .detail(found_in(line))
        })?;
        let Value::Object(mut fields) = value else {
            return Err(refused(format!("it is {}, not an object", kind_of(&value))));
        };
        Self::of_fields(&mut fields).map_err(|why| refused(why).detail(found_in(line)))
    }

    fn of_fields(fields: &mut Map<String, Value>) -> Result<Self, String> {
        let named: Vec<&str> = ["text", "messages", "prompt", "completion"]
            .into_iter()
            .filter(|name| fields.contains_key(*name))
            .collect();
        match named[..] {
            ["text"] => Ok(Self::Text(string(fields, "text")?)),
            ["prompt", "completion"] => Ok(Self::Completion {
                prompt: string(fields, "prompt")?,
                completion: string(fields, "completion")?,
            }),
            ["messages"] => {
                messages(fields.remove("messages").unwrap_or_default()).map(Self::Conversation)
            }
            ["prompt"] => Err("it has `prompt` without `completion`".to_owned()),
            ["completion"] => Err("it has `completion` without `prompt`".to_owned()),
            [] => Err("it has none of `text`, `messages`, `prompt` and `completion`".to_owned()),
            _ => Err(format!("it mixes kinds: it has `{}`", named.join("` and `"))),
        }
    }
}

/// Takes a string out of a line.
fn string(fields: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    match fields.remove(name).unwrap_or_default() {
        Value::String(text) => Ok(text),
        other => Err(format!("`{name}` is {}, not a string", kind_of(&other))),
    }
}

/// Checks the messages of a conversation.
fn messages(value: Value) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = value else {
        return Err(format!("`messages` is {}, not a list", kind_of(&value)));
    };
    if messages.is_empty() {
        return Err("`messages` is an empty list".to_owned());
    }
    for (index, message) in messages.iter().enumerate() {
        let Value::Object(fields) = message else {
            let kind = kind_of(message);
            return Err(format!("message {} is {kind}, not an object", index + 1));
        };
        for name in ["role", "content"] {
            match fields.get(name) {
                Some(Value::String(_)) => {}
                Some(other) => {
                    let kind = kind_of(other);
                    return Err(format!(
                        "`{name}` of message {} is {kind}, not a string",
                        index + 1
                    ));
                }
                None => return Err(format!("message {} has no `{name}`", index + 1)),
            }
        }
    }
    Ok(messages)
}

/// The type of a value, in words.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(line: &str) -> Result<TrainingLine, Failure> {
        TrainingLine::parse(line.as_bytes())
    }

    #[test]
    fn the_three_kinds_are_read_and_other_fields_skipped() {
        assert_eq!(
            parse("{\"url\": 1, \"text\": \"é\\n\"}\r\n"),
            Ok(TrainingLine::Text("é\n".to_owned()))
        );
        assert_eq!(
            parse(r#"{"completion": "b", "prompt": "a", "source": null}"#),
            Ok(TrainingLine::Completion { prompt: "a".to_owned(), completion: "b".to_owned() })
        );
        let message = json!({"role": "user", "content": "a", "name": "x"});
        assert_eq!(
            parse(&json!({ "messages": [message] }).to_string()),
            Ok(TrainingLine::Conversation(vec![message]))
        );
    }

    #[test]
    fn a_line_of_another_form_says_what_was_found_and_what_is_expected() {
        for (line, expected) in [
            ("{\"text\": \"a\"", "it is not JSON: EOF while parsing an object at column 12"),
            ("hello", "it is not JSON: expected value at column 1"),
            ("{\"text\": \"a\"} {}", "it is not JSON: trailing characters at column 15"),
            ("[1]", "it is a list, not an object"),
            ("null", "it is null, not an object"),
            (r#"{"content": "a"}"#, "it has none of `text`, `messages`, `prompt` and `completion`"),
            (r#"{"text": "a", "messages": []}"#, "it mixes kinds: it has `text` and `messages`"),
            (
                r#"{"messages": [], "prompt": "", "completion": ""}"#,
                "it has `messages` and `prompt` and `completion`",
            ),
            (r#"{"prompt": "a"}"#, "it has `prompt` without `completion`"),
            (r#"{"completion": "a"}"#, "it has `completion` without `prompt`"),
            (r#"{"text": 3}"#, "`text` is a number, not a string"),
            (r#"{"prompt": [], "completion": "a"}"#, "`prompt` is a list, not a string"),
            (r#"{"prompt": "a", "completion": true}"#, "`completion` is a boolean, not a string"),
            (r#"{"messages": "a"}"#, "`messages` is a string, not a list"),
            (r#"{"messages": []}"#, "`messages` is an empty list"),
            (r#"{"messages": ["a"]}"#, "message 1 is a string, not an object"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}"#,
                "message 2 has no `content`",
            ),
            (
                r#"{"messages": [{"role": "user", "content": {}}]}"#,
                "`content` of message 1 is an object, not a string",
            ),
        ] {
            let failure = parse(line).expect_err("must fail");
            assert!(
                failure.message.starts_with("not a training example: ")
                    && failure.message.ends_with(expected),
                "{line}: {failure}"
            );
            assert_eq!(failure.hint.as_deref(), Some(FORMS));
        }
        let failure = parse(r#"{"txt": "a", "id": 1}"#).expect_err("must fail");
        assert_eq!(failure.details, ["fields found: id, txt"]);
        assert!(TrainingLine::parse(b"{\"text\": \"\xff\"}").is_err());
    }
}
