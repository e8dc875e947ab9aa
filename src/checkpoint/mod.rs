//! The on-disk format, both directions: a checkpoint folder of safetensors shards is opened without reading its
//! weights, read through positioned reads, and written again in place, tensor by tensor, with the same layout.
//!
//! | file | story |
//! | --- | --- |
//! | `folder` | which shards a folder holds, and why a folder is refused |
//! | `header` | the header of one shard: parse, check, write |
//! | `source` | [`Checkpoint`], the [`WeightSource`] over open files |
//! | `writer` | [`CheckpointWriter`], the [`WeightSink`] into `*.partial` files |
//! | `written` | [`Written`], the model half-way through a run |
//! | `target` | the output folder: refused, or its files allocated |
//! | `verify`, `verify_tensor` | reading the written files back before they get their names |
//! | `elements` | stored elements as bits: zeros, changes, places |
//! | `scan` | one pass over a tensor: zeros, N:M groups, what differs from another checkpoint |
//! | `masks` | [`MaskWriter`], packed masks in one file |
//! | `sidecars` | config, tokenizer and licence files that travel along |
//! | `atomic` | small files that appear whole or not at all |
//! | `meter` | progress of long copies, as events |
//!
//! Nothing is memory mapped: resident memory is what was asked for, and a truncated file is an error, not a signal.

mod atomic;
mod elements;
mod folder;
mod header;
mod headers_only;
mod masks;
mod meter;
mod scan;
mod sidecars;
mod source;
mod target;
mod verify;
mod verify_tensor;
mod writer;
mod written;

#[cfg(test)]
mod header_tests;
#[cfg(test)]
mod source_tests;
#[cfg(test)]
mod test_files;
// These put symbolic links and positioned writes to work, which have other names elsewhere.
#[cfg(all(test, unix))]
mod writer_tests;

pub use atomic::{sync_folder, write_atomic};
pub use header::{TensorEntry, encode_header};
pub use headers_only::HeadersOnly;
pub use masks::{MASKS_FILE, MaskWriter};
pub(crate) use meter::Meter;
pub use scan::{ChangedElement, Compared, GROUP_SIZES, Scan, scan_tensor};
pub use sidecars::{CONFIG_FILE, SUMS_FILE, check_sidecars, is_model_file, sidecars_in};
pub use source::{Checkpoint, Shard, WeightSource};
pub use target::{output_bytes, refuse_source_folder};
pub use verify::{ExpectedMatrix, MatrixZeros, Verification, VerifiedFile, VerifyLevel};
pub use writer::{CheckpointWriter, Reopened, WeightSink};
pub use written::Written;

/// The single-file name every loader looks for.
pub const SINGLE_FILE: &str = "model.safetensors";

/// The index beside a sharded checkpoint: which tensor lies in which shard.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The suffix of a file that is not finished; no loader looks at it.
pub const PARTIAL_SUFFIX: &str = ".partial";

/// Bytes moved at once by copies and checks: large enough for full disk speed, small enough to forget in a plan.
pub(crate) const CHUNK_BYTES: usize = 8 << 20;
