//! Names of optimizers in transformers' Trainer (`OptimizerNames` of `training_args.py`, version 4.57). `SAME` has the names that mean an
//! optimizer of [`OPTIMIZERS`](super::OPTIMIZERS), `OTHERS` the names of optimizers that do not exist here.

/// Names of the Trainer with the same rule, each with ours. The variants of AdamW differ in the code that computes it only.
pub(super) const SAME: [(&str, &str); 10] = [
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw"),
    ("adamw_torch_xla", "adamw"),
    ("adamw_torch_npu_fused", "adamw"),
    ("adamw_apex_fused", "adamw"),
    ("adamw_bnb_8bit", "adamw8bit"),
    ("adamw_8bit", "adamw8bit"),
    ("paged_adamw", "paged-adamw32bit"),
    ("paged_adamw_32bit", "paged-adamw32bit"),
    ("paged_adamw_8bit", "paged-adamw8bit"),
];

/// Names of the Trainer whose rule or states do not exist here: `adamw_hf` adds epsilon elsewhere in the formula, and torchao's 8-bit
/// states differ from bitsandbytes' states.
const OTHERS: [&str; 37] = [
    "adafactor",
    "adagrad",
    "adalomo",
    "adamw_anyprecision",
    "adamw_hf",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "ademamix",
    "ademamix_8bit",
    "apollo_adamw",
    "apollo_adamw_layerwise",
    "galore_adafactor",
    "galore_adafactor_layerwise",
    "galore_adamw",
    "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
    "galore_adamw_layerwise",
    "grokadamw",
    "lion",
    "lion_32bit",
    "lion_8bit",
    "lomo",
    "muon",
    "paged_ademamix",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop",
    "rmsprop_bnb",
    "rmsprop_bnb_32bit",
    "rmsprop_bnb_8bit",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
    "stable_adamw",
];

/// Returns the optimizer of ours that is nearest to an optimizer of the Trainer without a match here: small states stay small, and paged
/// states stay in a file. `None` for a name that the Trainer does not have either.
pub fn nearest(name: &str) -> Option<&'static str> {
    let name = underscored(name);
    if !OTHERS.contains(&name.as_str()) {
        return None;
    }
    let is_paged = name.starts_with("paged");
    let is_small = name.contains("8bit") || name.contains("4bit");
    // These keep memory small by low ranks or by updates during the backward pass.
    let saves_memory = ["galore", "apollo", "lomo", "adalomo", "adafactor"];
    let saves_memory = saves_memory.iter().any(|family| name.starts_with(family));
    Some(match (is_paged, is_small) {
        _ if name.ends_with("sgd") => "sgd",
        (true, true) => "paged-adamw8bit",
        (true, false) => "paged-adamw32bit",
        (false, true) => "adamw8bit",
        (false, false) if saves_memory => "adamw8bit",
        (false, false) => "adamw",
    })
}

/// A name in lower case, with underscores in place of dashes.
pub(super) fn underscored(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::super::{OPTIMIZERS, find};
    use super::*;

    #[test]
    fn every_name_of_the_trainer_is_one_of_ours_or_has_a_nearest_one() {
        for (name, ours) in SAME {
            assert_eq!(find(name).map(|kind| kind.name), Some(ours), "{name}");
            assert_eq!(nearest(name), None, "{name}");
        }
        for name in OTHERS {
            assert!(find(name).is_none(), "{name}");
            let nearest = nearest(name).expect("listed");
            assert!(OPTIMIZERS.iter().any(|kind| kind.name == nearest), "{name}: {nearest}");
        }
        assert_eq!(nearest("paged_lion_8bit"), Some("paged-adamw8bit"));
        assert_eq!(nearest("schedule-free-sgd"), Some("sgd"));
        assert_eq!(nearest("adam"), None);
    }

    #[test]
    fn dashes_and_underscores_are_one() {
        for name in ["paged_adamw_8bit", "paged-adamw-8bit", "PAGED_ADAMW8BIT"] {
            assert_eq!(find(name).map(|kind| kind.name), Some("paged-adamw8bit"));
        }
    }
}
