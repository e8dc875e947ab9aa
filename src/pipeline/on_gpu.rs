//! What one GPU holds in each phase while it computes decoder layers: `model/on_device/cut.rs` has what a piece of work takes.
//!
//! ```text
//! calibrate, propagate, evaluate   context + tables + this layer's weights, and the next one's where it is read ahead + one
//!                                  sample on its way
//! head                             context + tables + the head's rows + one window's logits
//! ```
//!
//! Weights are scored on the host, where they lie anyway; a GPU has no part in that.

use super::workload::{Job, part};
use crate::bytes::ByteSize;
use crate::model::Rotary;
use crate::model::on_device::{CONTEXT, Cut};
use crate::placement::Need;
use crate::run::memory_settings::MemorySettings;

/// What each GPU that computes layers holds.
pub(super) fn needs(job: &Job<'_>, settings: &MemorySettings) -> Vec<Need> {
    let config = job.config;
    let element = job.gpu_dtype.bytes();
    let cut = Cut::of(settings, config);
    let standing = vec![
        part("context", CONTEXT),
        part(
            "rotary tables",
            ByteSize::of(Rotary::bytes(config.head_dim, job.seqlen), 1),
        ),
    ];
    let layer_bytes = Cut::layer_bytes(config, element);
    let layer = part("this layer", layer_bytes);
    let next = part(
        "the next layer",
        if settings.prefetch {
            layer_bytes
        } else {
            ByteSize::ZERO
        },
    );
    let cast = part(
        "a matrix as stored",
        Cut::cast_bytes(config, job.dtypes.layers.bytes(), element),
    );
    let sample = part("one sample", cut.pass_bytes(config, job.seqlen, element));
    let need = |phase, parts: Vec<_>| Need {
        phase,
        parts: [standing.clone(), parts].concat(),
    };
    let mut needs = Vec::new();
    let passes = vec![layer, next, cast, sample];
    if job.samples > 0 {
        needs.push(need("calibrate", passes.clone()));
        needs.push(need("propagate", passes.clone()));
    }
    if job.windows > 0 {
        needs.push(need("evaluate", passes));
        let rows = settings
            .head_rows
            .unwrap_or(usize::MAX)
            .min(config.vocab_size);
        let stored = match job.dtypes.head.bytes() {
            stored if stored == element => 0,
            stored => stored,
        };
        let head = ByteSize::of((rows + 1) * config.hidden_size, element + stored);
        let window = cut.head_bytes(config, job.seqlen, rows, element);
        needs.push(need(
            "head",
            vec![part("head", head), part("one window", window)],
        ));
    }
    needs
}
