//! Text generation: a model continues a prompt, so that a reader sees the effect of pruning.
//!
//! A [`Generator`] is a model whose layers are in memory or on disk, as planned; a [`Sequence`] holds the tokens it has read.
//! [`generate()`] picks token after token with a [`Sampler`] until a [`FinishReason`] applies; a
//! [`TextStream`](crate::data::TextStream) turns the tokens into text.
//!
//! | file | content |
//! | --- | --- |
//! | `bench` | the speed of decoding, compared with the memory's |
//! | `generate` | the generation loop: read the prompt, pick a token, read it, pick the next |
//! | `generator` | a model that reads tokens and computes the logits of the next token |
//! | `sampler` | the choice of the next token: the most likely token, or a token drawn by its probability |
//! | `sentence` | a greedy sentence, as `prune demo` shows it for each model |
//! | `stop` | the tokens that end a text |

pub mod bench;
pub mod generate;
pub mod generator;
pub mod sampler;
pub mod sentence;
pub mod stop;

pub use crate::linalg::CodedActivations;
pub use crate::model::{CacheDtype, HeadForm, WeightForm};
pub use bench::decoding_speed;
pub use generate::{FinishReason, Generated, GenerationRequest, generate};
pub use generator::{DecodingArithmetic, Generator, PROMPT_BLOCK, Sequence, SequenceShape};
pub use sampler::{Sampler, Sampling};
pub use sentence::sentence;
pub use stop::{stop_ids, stop_warning};
