//! `quantization_config` in `config.json` of a packed checkpoint.

use serde_json::{Value, json};

use super::choice::PackChoice;
use super::matrix::{OWN_METHOD, PackForm, PackedValues};

/// The key in `config.json`.
pub const KEY: &str = "quantization_config";

/// The method of checkpoints in the layout of compressed-tensors.
const METHOD: &str = "compressed-tensors";

/// The last version of compressed-tensors that reads the layout.
const VERSION: &str = "0.14.0.1";

/// Returns whether a `config.json` says that its checkpoint is in a layout of this room.
pub fn is_packed(config: &Value) -> bool {
    let Some(quantization) = config.get(KEY) else {
        return false;
    };
    if quantization.get("format").and_then(Value::as_str) == Some(OWN_METHOD) {
        return true;
    }
    match quantization.get("quant_method").and_then(Value::as_str) {
        Some(METHOD) => {
            let format = quantization.get("sparsity_config").and_then(|of| of.get("format"));
            let forms = [PackForm::Bitmask, PackForm::TwoOfFour].map(PackForm::name);
            let groups = quantization.get("config_groups").and_then(Value::as_object);
            // With groups, the kept values are quantised, too.
            format.and_then(Value::as_str).is_some_and(|format| forms.contains(&format))
                && groups.is_none_or(serde_json::Map::is_empty)
        }
        _ => false,
    }
}

/// The value of the key. With exact values, compressed-tensors to 0.14.0.1 reads the folder.
///
/// # Arguments
/// * `sparsity`: the share of zeros in the decoder linears
/// * `ignored`: modules whose weights stay dense, as the files name them
pub fn quantization_config(choice: &PackChoice, sparsity: f64, ignored: &[String]) -> Value {
    let structure = match choice.form {
        PackForm::Bitmask => "unstructured",
        PackForm::TwoOfFour => "2:4",
    };
    match choice.values {
        PackedValues::Exact => json!({
            "quant_method": METHOD,
            "version": VERSION,
            "sparsity_config": {
                "format": choice.form.name(),
                "global_sparsity": sparsity,
                "sparsity_structure": structure,
                "targets": ["Linear"],
                "ignore": ignored,
                "registry_requires_subclass": false
            },
            "transform_config": {}
        }),
        // No `quant_method`: of an unknown method transformers 4.57 warns, and loads random weights. Without any method it refuses the folder.
        PackedValues::Int8 => json!({
            "format": OWN_METHOD,
            "values": choice.values.name(),
            "is_lossy": true,
            "global_sparsity": sparsity,
            "ignore": ignored
        }),
    }
}
