//! `prune merge`: settle → outputs → pass → finish → record.
//!
//! | file | content |
//! | --- | --- |
//! | `combined` | `--semantics peft`: adapters, combined |
//! | `job` | what a settled merge has |
//! | `settle` | everything that can be wrong is checked; the settings that a continued run must share |
//! | `resolved` | the recipe with its models, and every tensor |
//! | `vocabulary` | the tokens of the output |
//! | `other_tokenizer` | a tokenizer in the folder of an adapter or of a model that is not merged |
//! | `models` | the input models and their adapters |
//! | `members` | a merge of several ranks |
//! | `documents` | the recipes of a file, one after the other |
//! | `devices` | the GPUs that compute |
//! | `donor` | the model whose configuration and tokenizer the output gets |
//! | `merge_recipe` | the merge of a recipe |
//! | `memory` | the memory of the pass |
//! | `evaluation` | perplexities of the models and of the merge |
//! | `saliency`, `saliency_file` | activation statistics: what is measured, and the file |
//! | `measuring`, `weighing` | the sweeps that measure, and tensors with their statistics |
//! | `outputs` | the files of the output, new or continued |
//! | `layer_settings` | settings of single layers in the configuration of a stack |
//! | `published` | the files beside the weights |
//! | `record` | `run.json` |

mod combined;
mod devices;
mod documents;
mod donor;
mod evaluation;
mod job;
mod layer_settings;
mod measuring;
mod members;
mod memory;
mod merge_recipe;
mod models;
mod other_tokenizer;
mod outputs;
mod published;
mod record;
mod resolved;
mod saliency;
mod saliency_file;
mod settle;
mod vocabulary;
mod weighing;

pub use combined::peft_methods;
pub use documents::{merge, merge_on};
