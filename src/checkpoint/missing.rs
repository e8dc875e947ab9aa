//! The failure for a tensor that a model needs and a checkpoint lacks, with the reason, which the checkpoint's names show.
//!
//! A training may save a model inside a wrapper, which puts its own name before the names of the tensors. A head that is the embedding
//! may be stored under either of two names.

use crate::failure::Failure;

/// Beginnings of names that a wrapper adds, and the wrapper.
const WRAPPERS: &[(&str, &str)] = &[
    ("_orig_mod.module.", "torch.compile over a parallel training"),
    ("module._orig_mod.", "a parallel training of a compiled model"),
    ("_orig_mod.", "torch.compile"),
    ("module.", "a parallel training (DistributedDataParallel, DeepSpeed)"),
    ("base_model.model.", "peft, which trained an adapter"),
    ("model.", "another model"),
];

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// The failure for the missing tensor `name` of `place`, which should have this `shape`. `has` knows the tensors that are there.
pub(super) fn missing(
    place: &str,
    has: &dyn Fn(&str) -> bool,
    name: &str,
    shape: &[usize],
) -> Failure {
    let failure = Failure::new(format!("tensor `{name}` is missing in `{place}`"))
        .detail(format!("expected a tensor of shape {shape:?}"));
    if name == HEAD && has(EMBEDDING) {
        return failure
            .detail("config.json says that the head is no copy of the embedding (`tie_word_embeddings` is false, or absent)")
            .hint(
                "if the model was trained with the embedding as its head, write \"tie_word_embeddings\": true into config.json; else download \
                 the checkpoint again",
            );
    }
    let layer = |name: &str| {
        name.strip_suffix(".weight").map(|module| format!("{module}.base_layer.weight"))
    };
    for &(prefix, wrapper) in WRAPPERS {
        let wrapped = format!("{prefix}{name}");
        let is_adapted =
            prefix.starts_with("base_model") && layer(&wrapped).is_some_and(|name| has(&name));
        if !has(&wrapped) && !is_adapted {
            continue;
        }
        let failure = failure.detail(format!(
            "its names begin with `{prefix}`: the checkpoint was saved inside the wrapper of {wrapper}"
        ));
        return match prefix {
            "base_model.model." => failure.hint(
                "save the model without the wrapper, in Python: model.merge_and_unload().save_pretrained(FOLDER); an adapter alone is saved by \
                 model.save_pretrained(FOLDER) and is given as MODEL+ADAPTER",
            ),
            _ => failure.hint(rename(place, &format!("k.removeprefix('{prefix}')"))),
        };
    }
    failure.hint("check that config.json and the weights belong together, or download them again")
}

/// The command that renames the tensors of a folder. `new` is a Python expression: the new name, from the old name `k`.
fn rename(place: &str, new: &str) -> String {
    format!(
        "rename its tensors: python -c \"import glob; from safetensors.torch import load_file as l, save_file as s; \
         [s({{{new}: v for k, v in l(f).items()}}, f, {{'format': 'pt'}}) for f in glob.glob('{place}/*.safetensors')]\"; an index \
         (model.safetensors.index.json) needs the same names"
    )
}
