//! The merge pass: rows of several models in, rows of one model out, tensor by tensor.
//!
//! | file | content |
//! | --- | --- |
//! | `rows` | [`SourceRows`], the rows of a tensor of a model in f32 |
//! | `mapped_rows` | [`MappedRows`], rows of an embedding in the order of the output's vocabulary |
//! | `merge_pass` | [`MergePass`], the loop over the tensors |
//! | `other_ranks` | a pass that several ranks share |
//! | `devices`, `on_candle` | [`MergeDevice`], a device that computes linears, its memory and its operators |
//! | `worker` | a thread of the pass |

mod devices;
mod mapped_rows;
mod merge_pass;
mod on_candle;
mod other_ranks;
mod rows;
mod worker;

pub use devices::MergeDevice;
pub use mapped_rows::MappedRows;
pub use merge_pass::{MergeJournal, MergePass, MergeTensor};
pub use on_candle::CandleMixer;
pub use rows::{AdaptedRows, MergeSources, ReplacedRows, SourceRows, StoredRows};
