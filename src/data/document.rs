//! A document, parsed from a line of JSON: a text, a conversation, or a prompt with its completion.
//!
//! Data sets have many fields, so the form is decided by the fields that are there and not null, in the order of [`DocumentShape::ALL`]. Unknown
//! fields are skipped, and values of a wrong type are refused, so a misspelt or half-written data set is an error with its place.

use super::conversation::{self, Conversation};
use super::ordered_json::OrderedJson;
use crate::failure::Failure;

/// The remedy for a line of no known form.
pub(super) const FORMS: &str = "rename the fields to one of: `text`; `messages` with `role` and `content`; `conversations` with `from` and \
     `value`; `prompt` and `completion`; `instruction`, `input` and `output`";

/// The remedy for a line that is not JSON.
const LINES: &str = "write each object in one line, or all objects as one list; correct or leave out a damaged line";

/// The remedy for a prompt and a completion of different kinds.
const COMPLETION: &str =
    "write `prompt` and `completion` both as strings, or both as lists of messages";

/// The form of a document, named by its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DocumentShape {
    Messages,
    Conversations,
    Completion,
    Instruction,
    Text,
}

impl DocumentShape {
    /// All shapes; the first whose fields are there decides.
    pub(super) const ALL: [Self; 5] =
        [Self::Messages, Self::Conversations, Self::Completion, Self::Instruction, Self::Text];

    /// The fields that a line of this shape must have.
    pub(super) fn needed(self) -> &'static [&'static str] {
        match self {
            Self::Messages => &["messages"],
            Self::Conversations => &["conversations"],
            Self::Completion => &["prompt", "completion"],
            Self::Instruction => &["instruction", "output"],
            Self::Text => &["text"],
        }
    }

    /// The name in messages: the fields that the shape has.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Messages => "messages",
            Self::Conversations => "conversations",
            Self::Completion => "prompt and completion",
            Self::Instruction => "instruction, input and output",
            Self::Text => "text",
        }
    }

    /// The shape of a line with these fields.
    pub(super) fn of(has: impl Fn(&str) -> bool) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.needed().iter().all(|name| has(name)))
    }
}

/// Every field that a document is made of.
pub(super) const FIELDS: [&str; 12] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
    "system",
    "tools",
    "documents",
    "chat_template_kwargs",
];

/// The content of a line.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Document {
    /// A text, on which all loss counts.
    Text(String),
    /// Messages for the chat template.
    Conversation(Conversation),
    /// A prompt and the completion that loss counts on.
    Completion {
        prompt: String,
        completion: String,
        /// The same as messages, for a model with a template.
        messages: Conversation,
    },
}

impl Document {
    /// Parses a line without a mark of UTF-8 before it; `None` if all fields that documents are made of are null or empty lists.
    /// The caller adds the place of the line to a failure. Fails when the line is not JSON, not an object, of no shape, and when a value has
    /// a wrong type.
    pub(super) fn parse(line: &[u8]) -> Result<Option<Self>, Failure> {
        let refused = |mut why: Failure| {
            why.message = format!("not a document: {}", why.message);
            why
        };
        let value = OrderedJson::parse(line).map_err(|error| {
            let reason = error.to_string();
            // The library counts lines within the line.
            let reason = reason.split(" at line ").next().unwrap_or_default();
            let why = format!("it is not JSON: {reason} at column {}", error.column());
            refused(Failure::new(why)).detail(found_in(line)).hint(LINES)
        })?;
        if !matches!(value, OrderedJson::Object(_)) {
            let why = format!("it is {}, not an object", value.kind());
            return Err(refused(Failure::new(why)).hint(FORMS));
        }
        Self::of(&value).map_err(|why| refused(why).detail(found_in(line)))
    }

    fn of(line: &OrderedJson) -> Result<Option<Self>, Failure> {
        let string = |name: &str| match line.get(name) {
            Some(OrderedJson::Text(text)) => Ok(text.as_str()),
            None => Ok(""),
            Some(other) => {
                let why = format!("`{name}` is {}, not a string", other.kind());
                Err(Failure::new(why)
                    .hint(format!("write \"{name}\": \"…\", or leave the line out")))
            }
        };
        let of_messages = |name: &str| -> Result<Option<Self>, Failure> {
            let messages = match line.get(name) {
                Some(value) => conversation::messages(value, name)?,
                None => Vec::new(),
            };
            if messages.is_empty() {
                return Ok(None);
            }
            let conversation = Conversation { messages, ..Conversation::default() };
            Ok(Some(Self::Conversation(conversation.with_fields_of(line)?)))
        };
        match DocumentShape::of(|name| line.get(name).is_some()) {
            Some(DocumentShape::Text) => Ok(Some(Self::Text(string("text")?.to_owned()))),
            Some(DocumentShape::Messages) => of_messages("messages"),
            Some(DocumentShape::Conversations) => of_messages("conversations"),
            Some(DocumentShape::Completion) => match (line.get("prompt"), line.get("completion")) {
                (Some(prompt @ OrderedJson::List(_)), Some(completion @ OrderedJson::List(_))) => {
                    let mut messages = conversation::messages(prompt, "prompt")?;
                    let answers_from = messages.len();
                    messages.extend(conversation::messages(completion, "completion")?);
                    let conversation =
                        Conversation { messages, answers_from, ..Conversation::default() };
                    Ok(Some(Self::Conversation(conversation.with_fields_of(line)?)))
                }
                _ => {
                    let both = |failure: Failure| failure.hint(COMPLETION);
                    let prompt = string("prompt").map_err(both)?;
                    let completion = string("completion").map_err(both)?;
                    let turns = [("user", prompt), (conversation::ASSISTANT, completion)];
                    Ok(Some(Self::Completion {
                        prompt: prompt.to_owned(),
                        completion: completion.to_owned(),
                        messages: Conversation::of(turns).with_fields_of(line)?,
                    }))
                }
            },
            Some(DocumentShape::Instruction) => {
                let [instruction, input, output] = ["instruction", "input", "output"].map(string);
                let (instruction, input, output) = (instruction?, input?, output?);
                let question = match input {
                    "" => instruction.to_owned(),
                    input => format!("{instruction}\n\n{input}"),
                };
                let turns = [("user", question.as_str()), (conversation::ASSISTANT, output)];
                Ok(Some(Self::Completion {
                    prompt: alpaca_prompt(instruction, input),
                    completion: output.to_owned(),
                    messages: Conversation::of(turns).with_fields_of(line)?,
                }))
            }
            None => Self::without_shape(line),
        }
    }

    /// The result for a line of no shape: nothing if its fields are there and null, else the reason why it is refused.
    fn without_shape(line: &OrderedJson) -> Result<Option<Self>, Failure> {
        let OrderedJson::Object(fields) = line else {
            return Ok(None);
        };
        let is_named = |name: &str| fields.iter().any(|(other, _)| other == name);
        let half = DocumentShape::ALL.into_iter().find_map(|shape| {
            let there = shape.needed().iter().find(|name| line.get(name).is_some())?;
            let missing = shape.needed().iter().find(|name| !is_named(name))?;
            Some(format!("it has `{there}` without `{missing}`"))
        });
        match (half, DocumentShape::of(is_named)) {
            (Some(half), _) => Err(Failure::new(half).hint(FORMS)),
            (None, Some(_)) => Ok(None),
            (None, None) => {
                let why = "it has none of the fields that documents are made of";
                // A data set inside an object, such as {"data": [{…}, …]}.
                let inside = fields.iter().find(|(_, value)| {
                    matches!(value, OrderedJson::List(list) if matches!(list[..], [OrderedJson::Object(_), ..]))
                });
                Err(match inside {
                    Some((name, _)) => Failure::new(why)
                        .detail(format!("`{name}` is a list of objects"))
                        .hint(format!(
                            "if `{name}` holds the documents, write its list alone; else {FORMS}"
                        )),
                    None => Failure::new(why).hint(FORMS),
                })
            }
        }
    }
}

/// The prompt of Alpaca's training code (tatsu-lab/stanford_alpaca, `train.py`), for a model without a template.
fn alpaca_prompt(instruction: &str, input: &str) -> String {
    let (with_input, input) = match input {
        "" => ("", String::new()),
        input => (
            ", paired with an input that provides further context",
            format!("### Input:\n{input}\n\n"),
        ),
    };
    format!(
        "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the request.\n\n\
         ### Instruction:\n{instruction}\n\n{input}### Response:"
    )
}

/// The content of a line, for a message: the names of its fields, else its beginning.
pub(super) fn found_in(line: &[u8]) -> String {
    match OrderedJson::parse(line) {
        Ok(OrderedJson::Object(fields)) => {
            let mut names: Vec<&str> =
                fields.iter().map(|(name, _)| name.as_str()).take(20).collect();
            if fields.len() > names.len() {
                names.push("…");
            }
            format!("fields found: {}", names.join(", "))
        }
        _ => format!(
            "it begins: {}",
            String::from_utf8_lossy(line).chars().take(60).collect::<String>().trim_end()
        ),
    }
}
