//! LoRA adapters of peft: read, checked, and added to the rows of a base model.
//!
//! ```text
//! W' = W + s·B·A                          s = α / r, or α / √r with rsLoRA
//! W' = m / ‖W + s·B·A‖ ∘ (W + s·B·A)      DoRA
//! ```
//!
//! The change of a tensor is computed in f32 row by row, when rows are asked for. So neither a full copy of the adapted model nor a
//! full s·B·A exists. The result is the model of peft's `merge_and_unload` (0.21.2), except that no product is rounded to f16 or bf16.
//!
//! | file | content |
//! | --- | --- |
//! | `config` | `adapter_config.json`: rank and scale of a module, refusals |
//! | `identity` | the hash of an adapter, and the memory of its factors |
//! | `keys` | keys of the file: tensor of the base, part of its change |
//! | `patterns` | the keys of rank and alpha patterns, matched within bounds |
//! | `stored` | a tensor of the file, widened to f32 |
//! | `parts` | the parts of a change, checked against one another and the base |
//! | `opened` | [`Adapter`], an opened folder |
//! | `low_rank` | the product of two factors, added to rows |
//! | `change` | [`TensorChange`], the change of a tensor |
//! | `adapted` | [`AdaptedSource`], base and adapter read as one model |
//! | `combine` | [`Combination`], several adapters into one, factor by factor |
//! | `combined_files` | a combination as a folder that peft loads |
//! | `tied` | an adapter of a base whose head is its embedding |
//! | `trained_files` | [`TrainedAdapter`], trained factors as a folder that peft loads |

mod adapted;
mod change;
mod combine;
mod combined_files;
mod config;
mod identity;
mod keys;
mod low_rank;
mod opened;
mod parts;
mod patterns;
mod stored;
mod tied;
mod trained_files;

#[cfg(test)]
mod combine_tests;
#[cfg(test)]
mod opened_tests;
#[cfg(test)]
mod test_files;

pub use adapted::AdaptedSource;
pub use change::TensorChange;
pub use combine::{AdapterShare, Combination, CombinationKind, Draws, MajoritySign};
pub use opened::Adapter;
pub use trained_files::TrainedAdapter;
