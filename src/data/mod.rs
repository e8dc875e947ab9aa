//! Text in, token ids out: the tokenizer, the corpora, the calibration samples and the evaluation windows.
//!
//! The room's promise is sameness: the same text, tokenizer and seed give the ids that the Python reference (locuslab/wanda
//! over Hugging Face `datasets`) gives, and a [`TextProtocol`](crate::run::TextProtocol) records enough to prove it. Texts are read
//! from local files only, which the caller downloaded, or are built in. [`Source::find`] finds the files of a text,
//! [`Source::check`] and [`Source::outlook`] look at them before any work starts, and [`calibration()`] and [`Source::evaluation`] read
//! them when the ids are needed.
//!
//! | file | content |
//! | --- | --- |
//! | `answer_places` | the places of the answers in a rendered conversation |
//! | `answers` | the tokens of a document, and the tokens that loss counts on |
//! | `arrow_rows` | the rows of an Arrow stream or file as documents |
//! | `cache` | a folder for data that is slow to compute: unpacked documents, and token ids |
//! | `calibration` | calibration samples: the parts of the text that statistics are computed from |
//! | `chat` | a model's chat template |
//! | `conversation` | messages for a chat template, read from the forms that data sets have |
//! | `dataset` | the value of `--dataset` and `--eval-dataset` |
//! | `dataset_folder` | the files of a data set in a folder, as the hub and the `datasets` library lay it out |
//! | `demo_text` | the text of `--dataset demo` and `--eval-dataset demo`: short stories, compressed into the program |
//! | `digest` | SHA-256 in hex of bytes, files and token ids |
//! | `document` | a document, parsed from a line of JSON: a text, a conversation, or a prompt with its completion |
//! | `document_text` | the text of a document for calibration and evaluation |
//! | `documents` | documents by number, from files larger than memory |
//! | `encoder` | a text turned into ids piece by piece, in memory that does not grow with the text |
//! | `evaluation` | evaluation windows: the text that perplexity is measured on |
//! | `example_order` | the order in which training takes its examples |
//! | `example_source` | training examples from a text: windows of a stream of tokens, or an example per document |
//! | `examples` | training examples: token ids of equal length, and the tokens that loss counts on |
//! | `footprint` | the memory of tokenizing, for the memory plan: from the size of a tokenizer and the size of a text |
//! | `joined` | texts that are tokenized as a whole |
//! | `json_array` | a JSON list of any length as JSON lines |
//! | `line_index` | the places of the lines of a large text, found in one pass over it |
//! | `line_memory` | the memory of a long line, and the longest line that a memory budget allows |
//! | `ordered_json` | a JSON value whose objects keep the order of the file |
//! | `outlook` | the size of a text, and the presence of its ids in the cache: the facts that its memory is planned with |
//! | `parquet_rows` | the rows of a parquet file as documents |
//! | `parquet_shape` | bounds for sizes that a parquet file announces |
//! | `parquet_text` | the string column `text` of a parquet file, row by row |
//! | `python_random` | CPython's `random.Random`, so that `--seed 0` draws the samples that the Python reference draws |
//! | `role` | the purpose of a text |
//! | `rows` | rows of a data set as JSON objects, from JSON lines or parquet |
//! | `row_lines` | rows of columns as lines of JSON |
//! | `same_text` | comparison of two sources by what is read |
//! | `shape_count` | the forms of the documents of a file, counted |
//! | `source` | the files of a dataset for a role, found once and handed on |
//! | `splits` | the files of a split in a folder |
//! | `staged` | files that are written under a temporary name and renamed when they are complete |
//! | `stored_form` | the stored form of a file of documents |
//! | `text_cut` | places where a text may be cut, so that the pieces have the ids of the whole text |
//! | `text_file` | UTF-8 text files: read in portions or line by line, with the place of the first byte that is not UTF-8 |
//! | `text_stream` | token ids to text, token by token, with whole characters only |
//! | `tokenizer` | text to token ids and back, with the special tokens that `transformers` would add |
//! | `tokenizer_bounds` | bounds of a `tokenizer.json` whose library follows it without any: replacements that lengthen a text |
//! | `tokenizer_config` | `tokenizer_config.json`, and the facts that it states in addition to `tokenizer.json` |
//! | `tokenizer_file` | the largest `tokenizer.json`, and the failures of a file that is missing or cannot be read |
//! | `unpacked` | the limit for the text of a packed file |
//! | `unpacking` | files of documents turned into JSON lines |

mod answer_places;
mod answers;
mod arrow_rows;
mod cache;
mod calibration;
pub mod chat;
mod conversation;
mod dataset;
mod dataset_folder;
mod demo_text;
mod digest;
mod document;
mod document_text;
mod documents;
mod encoder;
mod evaluation;
mod example_order;
mod example_source;
mod examples;
pub mod footprint;
mod joined;
mod json_array;
mod line_index;
mod line_memory;
mod ordered_json;
mod outlook;
mod parquet_rows;
mod parquet_shape;
mod parquet_text;
mod python_random;
mod role;
mod row_lines;
pub mod rows;
mod same_text;
mod shape_count;
mod source;
mod splits;
mod staged;
mod stored_form;
mod text_cut;
mod text_file;
mod text_stream;
mod tokenizer;
mod tokenizer_bounds;
mod tokenizer_config;
mod tokenizer_file;
mod unpacked;
mod unpacking;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use cache::TextCache;
pub use calibration::{Calibration, Draw, calibration};
pub use chat::ChatTemplate;
pub use dataset::{DatasetSpec, HubFile};
pub use digest::{IdHasher, of_ids as sha256_of_ids};
pub use encoder::tokenizing_threads;
pub use evaluation::Evaluation;
pub use example_order::ExampleOrder;
pub use example_source::{ExampleRequest, Packing};
pub use examples::{Examples, HeldOut};
pub use line_memory::LineMemory;
pub use outlook::TextOutlook;
pub use python_random::PythonRandom;
pub use role::Role;
pub use source::Source;
pub use text_stream::TextStream;
pub use tokenizer::Tokenizer;
