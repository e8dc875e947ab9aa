//! `quantization_config` in `config.json`.

use serde_json::{Value, json};

use super::stored::{FourBitFormat, python_dtype};
use safetensors::Dtype;

/// The key in `config.json`.
pub const KEY: &str = "quantization_config";

/// Returns whether a `config.json` says that its checkpoint is in the layout of this room: NF4 by bitsandbytes.
pub fn is_four_bit(config: &Value) -> bool {
    let Some(quantization) = config.get(KEY) else {
        return false;
    };
    let is = |key: &str, value: Value| quantization.get(key) == Some(&value);
    is("quant_method", json!("bitsandbytes"))
        && is("load_in_4bit", json!(true))
        && is("bnb_4bit_quant_type", json!("nf4"))
}

/// The value of the key, with which transformers loads the checkpoint. Products are computed in the dtype of the dense matrices.
/// `skipped` has modules that stay dense; without it, transformers leaves only the head dense.
pub fn quantization_config(
    format: FourBitFormat,
    dtype: Dtype,
    skipped: Option<Vec<String>>,
) -> Value {
    json!({
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": python_dtype(dtype).unwrap_or("float32"),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": format == FourBitFormat::Nf4Double,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "quant_method": "bitsandbytes"
    })
}
