//! The model families we know, and everything else refused by name.
//!
//! A new family whose layers are Llama's is one line in [`FAMILIES`]; one with other layers brings a file beside
//! `layer.rs` as well.

use anyhow::Result;
use serde_json::Value;

use crate::failure::Failure;

/// A model family: how `config.json` names it.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// `architectures[0]` in `config.json`.
    pub architecture: &'static str,
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// What a person calls it.
    pub models: &'static str,
}

/// Every family that can be pruned.
pub const FAMILIES: &[Family] = &[Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    models: "Llama 1, 2, 3, 3.1, 3.2, TinyLlama, and others with Llama's decoder",
}];

/// Finds the family a `config.json` belongs to.
///
/// # Errors
/// Fails for every other architecture, by its name.
pub fn identify(config: &Value) -> Result<&'static Family> {
    let model_type = config.get("model_type").and_then(Value::as_str);
    let architecture = config
        .get("architectures")
        .and_then(|names| names.get(0))
        .and_then(Value::as_str);
    let is_known = |family: &&Family| {
        model_type.is_none_or(|name| name == family.model_type)
            && architecture.is_none_or(|name| name == family.architecture)
    };
    if (model_type.is_some() || architecture.is_some())
        && let Some(family) = FAMILIES.iter().find(is_known)
    {
        return Ok(family);
    }
    let name = architecture
        .or(model_type)
        .unwrap_or("(neither `architectures` nor `model_type` is given)");
    let known: Vec<_> = FAMILIES
        .iter()
        .map(|family| format!("{}: {}", family.architecture, family.models))
        .collect();
    Err(
        Failure::new(format!("the architecture `{name}` is not supported"))
            .detail(format!("supported: {}", known.join("; ")))
            .hint("use a checkpoint whose config.json says `\"model_type\": \"llama\"`")
            .into(),
    )
}
