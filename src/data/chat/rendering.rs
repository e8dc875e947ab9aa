//! The rendering of a chat template in this process: compiled as `transformers` compiles it, with a bound on its steps.
//!
//! Fuel bounds the steps of a template, but a filter of the library counts as one step and may loop or allocate without end. So
//! the program renders in a process of its own ([`super::process`]), whose time and memory are bounded.

use std::thread;
use std::time::Duration;

use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, Value as Jinja, context};
use serde::{Deserialize, Serialize};

use super::super::ordered_json::OrderedJson;
use super::marks::{self, RenderedText};
use super::{clock, python};
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

/// A template and the conversation that it renders.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RenderingRequest {
    pub(super) template: String,
    /// Further variables of the template: special tokens, tools, documents.
    pub(super) variables: Vec<(String, OrderedJson)>,
    /// The moment of `strftime_now`, in seconds since 1970.
    pub(super) moment: i64,
    /// Objects.
    pub(super) messages: Vec<OrderedJson>,
    /// Beginnings of the conversation. Without any, the template is only compiled.
    pub(super) beginnings: Vec<Beginning>,
}

/// The beginning of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct Beginning {
    /// Number of messages.
    pub(in crate::data) messages: usize,
    /// The place at which the model answers follows.
    pub(in crate::data) is_answered: bool,
    /// The message that has [`PROBE`] as its content.
    pub(in crate::data) probed: Option<usize>,
}

/// The content of a message whose place in the rendered text is sought. No template changes a word, and no text has it.
pub(in crate::data) const PROBE: &str = "prune7place7of7the7answer";

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

/// The rendered beginnings. The first must be there; further ones are `None` if the template refuses them.
pub(super) type Rendered = Result<Vec<Option<RenderedText>>, Refusal>;

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
    let template = marks::as_filters(&request.template);
    let environment =
        environment(&template, request.moment).map_err(|error| Refusal::of(&error, None))?;
    let variables = request.variables.iter().map(|(_, value)| value);
    let texts: u64 = request.messages.iter().chain(variables).map(OrderedJson::length).sum();
    let longest = texts.saturating_mul(4).saturating_add(LONGEST);
    let messages: Vec<Jinja> = request.messages.iter().map(Jinja::from_serialize).collect();
    let mut fixed: Vec<(String, Jinja)> = Vec::new();
    // `transformers` defines these in every case.
    for name in ["tools", "documents"] {
        fixed.push((name.to_owned(), Jinja::from(())));
    }
    let variables = request.variables.iter();
    fixed.extend(variables.map(|(name, value)| (name.clone(), Jinja::from_serialize(value))));
    let render = |beginning: &Beginning| {
        watch();
        let mut given = messages[..beginning.messages.min(messages.len())].to_vec();
        if let Some((index, message)) =
            beginning.probed.and_then(|index| Some((index, request.messages.get(index)?)))
            && let Some(place) = given.get_mut(index)
        {
            *place = Jinja::from_serialize(probed(message));
        }
        let variables = fixed.iter().cloned().collect::<Jinja>();
        let variables = context! {
            messages => given,
            add_generation_prompt => beginning.is_answered,
            ..variables
        };
        let count = Some(beginning.messages);
        let template = environment.get_template("chat");
        let text = template.and_then(|template| template.render(variables));
        let text = text.map_err(|error| Refusal::of(&error, count))?;
        if text.len() as u64 > longest {
            let (long, most) = (ByteSize(text.len() as u64), ByteSize(longest));
            return Err(Refusal {
                messages: count,
                ..Refusal::new(format!("it makes {long} of text, the limit is {most}"))
            });
        }
        Ok(marks::found(&text))
    };
    let mut beginnings = request.beginnings.iter();
    let Some(first) = beginnings.next() else {
        return Ok(Vec::new());
    };
    let first = Some(render(first)?);
    Ok([first].into_iter().chain(beginnings.map(|beginning| render(beginning).ok())).collect())
}

/// A message with [`PROBE`] as its content.
fn probed(message: &OrderedJson) -> OrderedJson {
    let OrderedJson::Object(fields) = message else {
        return message.clone();
    };
    let others = fields.iter().filter(|(name, _)| name != "content").cloned();
    OrderedJson::Object(others.chain([("content".to_owned(), OrderedJson::from(PROBE))]).collect())
}

/// The template as `transformers` would compile it.
fn environment(template: &str, moment: i64) -> Result<Environment<'_>, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value))?));
    environment
        .add_filter("tojson", |value: &Jinja, given: Rest<Jinja>| python::dumps(value, &given));
    environment.add_filter("string", |value: &Jinja| python::text(value));
    environment.add_filter(marks::FILTER, marks::around);
    environment.add_function("raise_exception", refuse);
    environment.add_function("strftime_now", move |format: &str| clock::shown(moment, format));
    environment.add_template("chat", template)?;
    Ok(environment)
}

/// The function `raise_exception` of templates.
fn refuse(why: String) -> Result<Jinja, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, why))
}

/// The longest time of a rendering. Published templates take milliseconds.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
