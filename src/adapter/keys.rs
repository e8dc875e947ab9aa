//! Keys of an adapter's file: the tensor of the base, and the part of its change.
//!
//! peft writes `base_model.model.<module>.lora_A.weight` and its relatives, without the name of the adapter. A key that does not
//! belong to a LoRA is the full name of a tensor that replaces the base's.

use crate::checkpoint::name_of_text_model;

/// A part of the change of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ChangePart {
    /// A of a linear layer: `[r, in_features]`.
    Down,
    /// B of a linear layer: `[out_features, r]`.
    Up,
    /// A of an embedding: `[r, rows]`.
    EmbeddingDown,
    /// B of an embedding: `[columns, r]`.
    EmbeddingUp,
    /// The bias of B, which is added to the base's bias: `[out_features]`.
    UpBias,
    /// Row norms of DoRA: `[out_features]`.
    Magnitude,
    /// Copy of the base's tensor under the factors. peft loads it in place of the base's.
    Copy,
    /// A tensor of `modules_to_save`, or a bias that was trained.
    Whole,
    /// A tensor of `modules_to_save` in an older spelling.
    SavedModule,
    /// The base's tensor, stored next to a tensor of `modules_to_save`. peft does not use it.
    Original,
    /// Rows of `trainable_token_indices`.
    Tokens,
}

impl ChangePart {
    /// Returns whether the part is a factor of a LoRA, which belongs to a target module.
    pub(super) fn is_factor(self) -> bool {
        matches!(self, Self::Down | Self::Up | Self::EmbeddingDown | Self::EmbeddingUp)
    }
}

/// Beginning of every key.
pub(super) const PREFIX: &str = "base_model.model.";

/// The place of the text model inside a model of several media, in the classes of transformers.
pub(super) const INSIDE: &str = "model.language_model.";

/// The name of a text model's module inside a model of several media.
pub(super) fn inside(module: &str) -> String {
    match module.strip_prefix("model.") {
        Some(rest) => format!("{INSIDE}{rest}"),
        None => module.to_owned(),
    }
}

/// Returns whether a key names the text model inside a model of several media.
pub(super) fn is_inside(key: &str) -> bool {
    key.strip_prefix(PREFIX).is_some_and(|rest| name_of_text_model(rest) != rest)
}

/// Ending of a key, ending of the base's tensor, part.
const ENDINGS: &[(&str, &str, ChangePart)] = &[
    (".lora_A.weight", ".weight", ChangePart::Down),
    (".lora_B.weight", ".weight", ChangePart::Up),
    (".lora_B.bias", ".bias", ChangePart::UpBias),
    (".lora_embedding_A", ".weight", ChangePart::EmbeddingDown),
    (".lora_embedding_B", ".weight", ChangePart::EmbeddingUp),
    (".lora_magnitude_vector", ".weight", ChangePart::Magnitude),
    (".lora_magnitude_vector.weight", ".weight", ChangePart::Magnitude),
    (".base_layer.weight", ".weight", ChangePart::Copy),
    (".base_layer.bias", ".bias", ChangePart::Copy),
    (".modules_to_save.weight", ".weight", ChangePart::SavedModule),
    (".modules_to_save.default.weight", ".weight", ChangePart::SavedModule),
    (".original_module.weight", ".weight", ChangePart::Original),
    (".token_adapter.trainable_tokens_delta", ".weight", ChangePart::Tokens),
];

/// Returns the name of the base's tensor and the part of its change; `None` for an unknown key.
pub(super) fn parse(key: &str) -> Option<(String, ChangePart)> {
    // peft names the text model inside a model of several media by its place there.
    let rest = name_of_text_model(key.strip_prefix(PREFIX)?);
    for (ending, tensor, part) in ENDINGS {
        if let Some(module) = rest.strip_suffix(ending) {
            return Some((format!("{module}{tensor}"), *part));
        }
    }
    let is_parameter = rest.ends_with(".weight") || rest.ends_with(".bias");
    (is_parameter && !rest.contains("lora_")).then_some((rest, ChangePart::Whole))
}

/// The module of a tensor: its name without `.weight` or `.bias`.
pub(super) fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_a_tensor_of_the_base_and_a_part() {
        let q = "base_model.model.model.layers.0.self_attn.q_proj";
        let cases = [
            ("lora_A.weight", "weight", ChangePart::Down),
            ("lora_B.weight", "weight", ChangePart::Up),
            ("lora_B.bias", "bias", ChangePart::UpBias),
            ("lora_magnitude_vector", "weight", ChangePart::Magnitude),
            ("lora_magnitude_vector.weight", "weight", ChangePart::Magnitude),
            ("base_layer.weight", "weight", ChangePart::Copy),
            ("base_layer.bias", "bias", ChangePart::Copy),
            ("bias", "bias", ChangePart::Whole),
            ("weight", "weight", ChangePart::Whole),
            ("modules_to_save.weight", "weight", ChangePart::SavedModule),
        ];
        for (ending, tensor, part) in cases {
            assert_eq!(
                parse(&format!("{q}.{ending}")),
                Some((format!("model.layers.0.self_attn.q_proj.{tensor}"), part))
            );
        }
        assert_eq!(
            parse("base_model.model.model.embed_tokens.lora_embedding_A"),
            Some(("model.embed_tokens.weight".into(), ChangePart::EmbeddingDown))
        );
    }

    #[test]
    fn other_keys_have_no_meaning() {
        let q = "base_model.model.model.layers.0.self_attn.q_proj";
        for key in [
            "model.layers.0.self_attn.q_proj.lora_A.weight".to_owned(),
            format!("{q}.lora_A.default.weight"),
            format!("{q}.lora_C.weight"),
            format!("{q}.lora_diag"),
            format!("{q}.weight.absmax"),
            String::new(),
        ] {
            assert_eq!(parse(&key), None, "{key}");
        }
    }
}
