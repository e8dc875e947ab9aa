//! Text in, token ids out: the tokenizer, the corpora, the calibration samples and the evaluation windows.
//!
//! The room's promise is sameness: the same text, tokenizer and seed give the ids that the Python reference (locuslab/wanda
//! over Hugging Face `datasets`) gives, and a [`TextProtocol`](crate::run::TextProtocol) records enough to prove it. Texts are read from local files only,
//! which the caller downloaded, or are built in. [`Source::find`] finds the files of a text, [`Source::check`] and
//! [`Source::outlook`] look at them before any work starts, and [`calibration()`] and [`evaluation()`] read them when the ids are
//! needed.

mod answers;
mod cache;
mod calibration;
pub mod chat;
mod dataset;
mod demo_text;
mod digest;
mod documents;
mod encoder;
mod evaluation;
mod example_order;
mod example_source;
mod examples;
pub mod footprint;
mod joined;
mod line_index;
mod line_memory;
mod outlook;
mod parquet_shape;
mod parquet_text;
mod python_random;
mod role;
mod same_text;
mod source;
mod splits;
mod staged;
mod text_cut;
mod text_file;
mod text_stream;
mod tokenizer;
mod tokenizer_bounds;
mod tokenizer_config;
mod training_line;
mod unpacked;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use cache::TextCache;
pub use calibration::{Calibration, Draw, calibration};
pub use chat::ChatTemplate;
pub use dataset::{DatasetSpec, HubFile};
pub use evaluation::{Evaluation, evaluation};
pub use example_order::ExampleOrder;
pub use example_source::{ExampleRequest, Packing, examples};
pub use examples::{Examples, HeldOut};
pub use line_memory::LineMemory;
pub use outlook::TextOutlook;
pub use python_random::PythonRandom;
pub use role::Role;
pub use source::Source;
pub use text_stream::TextStream;
pub use tokenizer::Tokenizer;
