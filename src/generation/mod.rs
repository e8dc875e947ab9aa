//! Letting a model write: what perplexity means, as a text one can read.
//!
//! A [`Generator`] is a model whose layers rest where a plan put them; a [`Sequence`] is what it has read so far. [`write()`] picks
//! one token after the other with a [`Sampler`] until a [`Finish`]; a [`TextStream`] turns them into text as they come.

pub mod generator;
pub mod sampler;
pub mod sentence;
pub mod stop;
pub mod text_stream;
pub mod writing;

pub use generator::{Generator, PROMPT_BLOCK, Sequence};
pub use sampler::{Sampler, Sampling};
pub use sentence::sentence;
pub use stop::stop_ids;
pub use text_stream::TextStream;
pub use writing::{Finish, Order, Written, write};
