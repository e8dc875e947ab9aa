//! Checkpoint folders of safetensors shards. A folder is opened without reading its weights, read by positioned reads, and written
//! with the same layout or a new layout, tensor by tensor.
//!
//! | file | content |
//! | --- | --- |
//! | `folder` | the shards of a folder, and the refusal of unusable folders |
//! | `not_a_model`, `missing` | the refusal of a path that is no model, and of a missing tensor: the reason, and a way out |
//! | `header` | the header of a shard: parse, check, write |
//! | `source` | [`Checkpoint`], the [`WeightSource`] over open files |
//! | `weight_source` | [`WeightSource`], the trait |
//! | `layout` | [`Layout`], the files of an output and the positions of its tensors |
//! | `writer` | [`CheckpointWriter`], which writes a model with the layout of its source |
//! | `layout_writer` | [`LayoutWriter`], which writes any layout: tensors in pieces, from several threads |
//! | `output_files` | the `*.partial` files of both writers |
//! | `written` | [`PartialModel`], the model during a run |
//! | `target` | checks of the output folder, and allocation of its files |
//! | `publish` | the final names of the written files, and the files beside them |
//! | `verify`, `verify_tensor` | checks of the written files before they get their names |
//! | `elements` | stored elements as bits: zeros, changes, positions |
//! | `scan` | one pass over a tensor: zeros, N:M groups, differences from a second checkpoint |
//! | `masks` | [`MaskWriter`], packed masks in a file |
//! | `sidecars` | config, tokenizer and licence files, copied with the weights; cards, which may get new names |
//! | `atomic` | small files that appear whole or not at all |
//! | `sealed` | such files with their length and hash, from which a later process continues |
//! | `names` | names of files |
//! | `naming` | names of a decoder's tensors: as a file stores them, and as the program uses them |
//! | `headers_only` | `HeadersOnly`: the headers of a checkpoint whose weights were not downloaded |
//!
//! Nothing is memory mapped. So resident memory is what the program allocates, and a truncated file is an error, not a signal.

mod atomic;
mod elements;
mod folder;
mod header;
mod headers_only;
mod layout;
mod layout_writer;
mod masks;
mod missing;
mod names;
mod naming;
mod not_a_model;
mod output_files;
mod publish;
mod scan;
mod sealed;
mod sidecars;
mod source;
mod target;
mod verify;
mod verify_tensor;
mod weight_source;
mod writer;
mod written;

#[cfg(test)]
mod header_tests;
#[cfg(test)]
mod source_tests;
#[cfg(test)]
mod test_files;
// These tests use symbolic links and positioned writes, whose functions have different names outside Unix.
#[cfg(all(test, unix))]
mod layout_writer_tests;
#[cfg(all(test, unix))]
mod reopen_tests;
#[cfg(all(test, unix))]
mod writer_tests;

pub use atomic::{cannot_write, sync_folder, write_atomic, write_atomic_with};
pub use folder::is_plain_name;
pub use header::{TensorEntry, encode_header, in_a_row};
pub use headers_only::HeadersOnly;
pub use layout::{Layout, PlannedFile, PlannedTensor};
pub use layout_writer::{LayoutWriter, TensorStream};
pub use masks::{MASKS_FILE, MaskWriter};
pub(crate) use names::CHUNK_BYTES;
#[cfg(feature = "synthetic")]
pub(crate) use names::partial_of;
pub use names::{
    CONFIG_FILE, INDEX_FILE, MERGE_CONFIG_FILE, MERGING_FILE, PACKED_FILE, PARTIAL_SUFFIX,
    SINGLE_FILE,
};
pub use naming::{is_of_text_model, name_of_text_model};
pub use not_a_model::not_a_model;
pub use publish::{Published, replace_published};
pub use scan::{ChangedElement, Compared, GROUP_SIZES, Scan, scan_tensor};
pub use sealed::{check_sealed_json, open_sealed, write_sealed_json, write_sealed_with};
pub use sidecars::{
    CARD_FILE, SUMS_FILE, card_of_source, cards_in, check_sidecars, is_model_file, sidecars_in,
};
pub use source::{Checkpoint, Shard};
pub use target::{OUTPUT_FLAGS, output_bytes, refuse_source_folder};
pub use verify_tensor::ExpectedMatrix;
pub use weight_source::{KeptRows, WeightSource};
pub use writer::CheckpointWriter;
pub use written::{PartialModel, WrittenPlaces};
