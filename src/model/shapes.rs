//! Shapes of published models by name, for plans without a checkpoint. The numbers are those of the models' `config.json`.

use serde_json::json;

use super::config::ModelConfig;
use crate::linalg::StoredDtype;

/// A published model's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The name for `--shape`.
    pub name: &'static str,
    /// The dtype of the published weights.
    pub dtype: StoredDtype,
    /// hidden, intermediate, layers, query heads, key/value heads, vocabulary, positions.
    numbers: [usize; 7],
    is_tied: bool,
}

/// All shapes, smallest first.
pub const SHAPES: [Shape; 7] = [
    Shape {
        name: "llama-3.2-1b",
        dtype: StoredDtype::Bf16,
        numbers: [2048, 8192, 16, 32, 8, 128_256, 131_072],
        is_tied: true,
    },
    Shape {
        name: "llama-3.2-3b",
        dtype: StoredDtype::Bf16,
        numbers: [3072, 8192, 28, 24, 8, 128_256, 131_072],
        is_tied: true,
    },
    Shape {
        name: "llama-2-7b",
        dtype: StoredDtype::F16,
        numbers: [4096, 11008, 32, 32, 32, 32_000, 4096],
        is_tied: false,
    },
    Shape {
        name: "llama-2-13b",
        dtype: StoredDtype::F16,
        numbers: [5120, 13824, 40, 40, 40, 32_000, 4096],
        is_tied: false,
    },
    Shape {
        name: "llama-30b",
        dtype: StoredDtype::F16,
        numbers: [6656, 17920, 60, 52, 52, 32_000, 2048],
        is_tied: false,
    },
    Shape {
        name: "llama-2-70b",
        dtype: StoredDtype::F16,
        numbers: [8192, 28672, 80, 64, 8, 32_000, 4096],
        is_tied: false,
    },
    Shape {
        name: "llama-3.1-405b",
        dtype: StoredDtype::Bf16,
        numbers: [16384, 53248, 126, 128, 8, 128_256, 131_072],
        is_tied: false,
    },
];

/// The shape of this name.
pub fn shape(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

impl Shape {
    /// The model's configuration.
    ///
    /// # Errors
    /// Fails for numbers that no configuration may have. A test reads all shapes of the table.
    pub fn config(&self) -> anyhow::Result<ModelConfig> {
        let [
            hidden,
            intermediate,
            layers,
            heads,
            key_value_heads,
            vocabulary,
            positions,
        ] = self.numbers;
        ModelConfig::from_json(&json!({
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": positions,
            "tie_word_embeddings": self.is_tied,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::footprint;

    #[test]
    fn shapes_have_the_parameters_their_models_are_published_with() {
        // Counted from the published checkpoints.
        let published = [
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-30b", 32_528_943_616),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3.1-405b", 405_853_388_800u64),
        ];
        for (shape, (name, parameters)) in SHAPES.iter().zip(published) {
            let config = shape.config().unwrap();
            assert_eq!(
                (shape.name, footprint::parameters(&config)),
                (name, parameters)
            );
        }
    }
}
