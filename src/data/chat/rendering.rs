//! The rendering of a chat template in this process: compiled as `transformers` compiles it, with a bound on its steps.
//!
//! Fuel bounds the steps of a template, but a filter of the library counts as one step and may loop or allocate without end. So
//! the program renders in a process of its own ([`super::process`]), whose time and memory are bounded.

use std::thread;
use std::time::Duration;

use minijinja::{Environment, Error, ErrorKind, Value as Jinja, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bytes::ByteSize;
use crate::failure::{Failure, blaming};

/// The largest template. Published templates have up to 30 KB.
pub(super) const LARGEST: ByteSize = ByteSize(128 << 10);
/// Steps of a template at most. Published templates take thousands; a template without an end is refused.
const FUEL: u64 = 1_000_000;
/// Stack of the thread that renders. The library follows chains and nested values by recursion. The longest chain of a template of
/// this size (`x()()()…`) needs between 128 and 256 MiB without optimization. Only the part in use takes memory.
pub(super) const STACK: usize = 512 << 20;
/// The longest rendering of a conversation: this, and four times the text of the conversation.
const LONGEST: u64 = 1 << 20;

/// The fields of a message, in order.
pub(super) type Message = Vec<(String, Value)>;

/// A template and the conversation that it renders.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RenderingRequest {
    pub(super) template: String,
    /// The special tokens, which are variables of the template.
    pub(super) tokens: Map<String, Value>,
    pub(super) messages: Vec<Message>,
    /// Beginnings of the conversation: a number of messages, and whether the place at which the model answers follows. Without any,
    /// the template is only compiled.
    pub(super) beginnings: Vec<(usize, bool)>,
}

/// The refusal of a template or of a conversation.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    /// The reason, to be read after "the chat template … cannot be used:".
    pub(super) why: String,
    /// The kind of the error and its line.
    pub(super) place: Option<String>,
    /// The number of messages that were being rendered; `None` if the template itself is refused.
    pub(super) messages: Option<usize>,
}

/// The rendered beginnings.
pub(super) type Rendered = Result<Vec<String>, Refusal>;

impl Refusal {
    pub(super) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), place: None, messages: None }
    }

    fn of(error: &Error, messages: Option<usize>) -> Self {
        let why = error.detail().unwrap_or("the reason is not stated");
        let place = error.line();
        Self {
            place: place.map(|line| format!("{} in line {line} of the template", error.kind())),
            messages,
            ..Self::new(why)
        }
    }
}

/// Renders on a thread with a stack that is large enough for any template. `watch` is called before each rendering.
pub(super) fn rendered(request: &RenderingRequest, watch: &(dyn Fn() + Sync)) -> Rendered {
    const FAILED: &str = "the template library failed";
    if request.template.len() as u64 > LARGEST.0 {
        let bytes = ByteSize(request.template.len() as u64);
        return Err(Refusal::new(format!("it has {bytes}, the limit is {LARGEST}")));
    }
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(STACK)
            .spawn_scoped(scope, || blaming(Failure::new(FAILED), || beginnings(request, watch)));
        match thread.map(thread::ScopedJoinHandle::join) {
            Err(error) => Err(Refusal::new(format!("the thread for it does not start: {error}"))),
            Ok(Ok(Ok(answer))) => answer,
            Ok(_) => Err(Refusal::new(FAILED)),
        }
    })
}

fn beginnings(request: &RenderingRequest, watch: &(dyn Fn() + Sync)) -> Rendered {
    watch();
    let environment = environment(&request.template).map_err(|error| Refusal::of(&error, None))?;
    let texts = request.messages.iter().flatten();
    let texts: u64 = texts.map(|(_, value)| length(value)).sum();
    let longest = texts.saturating_mul(4).saturating_add(LONGEST);
    let messages: Vec<Jinja> = request.messages.iter().map(message).collect();
    let render = |&(count, is_answered): &(usize, bool)| {
        watch();
        let variables = context! {
            messages => messages[..count.min(messages.len())],
            add_generation_prompt => is_answered,
            ..Jinja::from_serialize(&request.tokens)
        };
        let template = environment.get_template("chat");
        let text = template.and_then(|template| template.render(variables));
        let text = text.map_err(|error| Refusal::of(&error, Some(count)))?;
        if text.len() as u64 > longest {
            let (long, most) = (ByteSize(text.len() as u64), ByteSize(longest));
            return Err(Refusal {
                messages: Some(count),
                ..Refusal::new(format!("it makes {long} of text, the limit is {most}"))
            });
        }
        Ok(text)
    };
    request.beginnings.iter().map(render).collect()
}

/// A message as templates see it.
fn message(fields: &Message) -> Jinja {
    let fields = fields.iter();
    fields.map(|(name, value)| (name.as_str(), Jinja::from_serialize(value))).collect()
}

/// Bytes of text in a value.
fn length(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.len() as u64,
        other => other.to_string().len() as u64,
    }
}

/// The template as `transformers` would compile it.
fn environment(template: &str) -> Result<Environment<'_>, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", refuse);
    environment.add_template("chat", template)?;
    Ok(environment)
}

/// The function `raise_exception` of templates.
fn refuse(why: String) -> Result<Jinja, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, why))
}

/// The longest time of a rendering. Published templates take milliseconds.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
