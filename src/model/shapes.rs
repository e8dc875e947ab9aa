//! Shapes of published models by name, for plans without a checkpoint. The numbers come from the models' `config.json`.

use serde_json::json;

use super::config::ModelConfig;
use crate::linalg::StoredDtype;

/// A published model's shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// The name for `--shape`.
    pub name: &'static str,
    model_type: &'static str,
    /// The dtype of the published weights.
    pub dtype: StoredDtype,
    /// hidden, intermediate, layers, query heads, key/value heads, vocabulary, positions.
    numbers: [usize; 7],
    is_tied: bool,
    rope: Rope,
}

/// Rotary positions of a shape.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rope {
    theta: f64,
    /// Factor of Llama 3.1's scaling.
    factor: Option<f64>,
}

const LLAMA_2: Rope = Rope { theta: 10_000.0, factor: None };

const LLAMA_3: Rope = Rope { theta: 500_000.0, factor: None };

const fn llama_3_1(factor: f64) -> Rope {
    Rope { factor: Some(factor), ..LLAMA_3 }
}

/// All shapes, smallest first.
pub const SHAPES: [Shape; 13] = [
    // The dtype of the chat model.
    Shape {
        name: "tinyllama-1.1b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [2048, 5632, 22, 32, 4, 32_000, 2048],
        is_tied: false,
        rope: LLAMA_2,
    },
    Shape {
        name: "llama-3.2-1b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [2048, 8192, 16, 32, 8, 128_256, 131_072],
        is_tied: true,
        rope: llama_3_1(32.0),
    },
    Shape {
        name: "llama-3.2-3b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [3072, 8192, 28, 24, 8, 128_256, 131_072],
        is_tied: true,
        rope: llama_3_1(32.0),
    },
    Shape {
        name: "llama-2-7b",
        model_type: "llama",
        dtype: StoredDtype::F16,
        numbers: [4096, 11_008, 32, 32, 32, 32_000, 4096],
        is_tied: false,
        rope: LLAMA_2,
    },
    // v0.1, with a sliding window of 4096 tokens, which is the default of its family.
    Shape {
        name: "mistral-7b",
        model_type: "mistral",
        dtype: StoredDtype::Bf16,
        numbers: [4096, 14_336, 32, 32, 8, 32_000, 32_768],
        is_tied: false,
        rope: LLAMA_2,
    },
    Shape {
        name: "llama-3-8b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [4096, 14_336, 32, 32, 8, 128_256, 8192],
        is_tied: false,
        rope: LLAMA_3,
    },
    Shape {
        name: "llama-3.1-8b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [4096, 14_336, 32, 32, 8, 128_256, 131_072],
        is_tied: false,
        rope: llama_3_1(8.0),
    },
    Shape {
        name: "llama-2-13b",
        model_type: "llama",
        dtype: StoredDtype::F16,
        numbers: [5120, 13_824, 40, 40, 40, 32_000, 4096],
        is_tied: false,
        rope: LLAMA_2,
    },
    Shape {
        name: "llama-30b",
        model_type: "llama",
        dtype: StoredDtype::F16,
        numbers: [6656, 17_920, 60, 52, 52, 32_000, 2048],
        is_tied: false,
        rope: LLAMA_2,
    },
    Shape {
        name: "llama-2-70b",
        model_type: "llama",
        dtype: StoredDtype::F16,
        numbers: [8192, 28_672, 80, 64, 8, 32_000, 4096],
        is_tied: false,
        rope: LLAMA_2,
    },
    Shape {
        name: "llama-3-70b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [8192, 28_672, 80, 64, 8, 128_256, 8192],
        is_tied: false,
        rope: LLAMA_3,
    },
    Shape {
        name: "llama-3.1-70b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [8192, 28_672, 80, 64, 8, 128_256, 131_072],
        is_tied: false,
        rope: llama_3_1(8.0),
    },
    Shape {
        name: "llama-3.1-405b",
        model_type: "llama",
        dtype: StoredDtype::Bf16,
        numbers: [16_384, 53_248, 126, 128, 8, 128_256, 131_072],
        is_tied: false,
        rope: llama_3_1(8.0),
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
        let [hidden, intermediate, layers, heads, key_value_heads, vocabulary, positions] =
            self.numbers;
        let rope_scaling = self.rope.factor.map(|factor| {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            })
        });
        ModelConfig::from_json(&json!({
            "model_type": self.model_type,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": positions,
            "tie_word_embeddings": self.is_tied,
            "rope_theta": self.rope.theta,
            "rope_scaling": rope_scaling,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::RopeScaling;
    use crate::model::footprint;

    #[test]
    fn shapes_have_the_parameters_their_models_are_published_with() {
        // Counted from the published checkpoints.
        let published = [
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("llama-2-7b", 6_738_415_616),
            ("mistral-7b", 7_241_732_096),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-2-13b", 13_015_864_320),
            ("llama-30b", 32_528_943_616),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3-70b", 70_553_706_496),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800u64),
        ];
        let counted = SHAPES.map(|shape| {
            let config = shape.config().unwrap();
            (shape.name, footprint::parameters(&config))
        });
        assert_eq!(counted, published);
    }

    #[test]
    fn shapes_have_the_positions_of_their_models() {
        let config = |name| shape(name).unwrap().config().unwrap();
        let llama = config("llama-3.1-8b");
        assert_eq!(
            llama.ropes[0].scaling,
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            }
        );
        assert_eq!((llama.ropes[0].theta, llama.max_position_embeddings), (500_000.0, 131_072));
        assert_eq!(config("llama-3.2-3b").head_dim, 128);
        assert_eq!(config("llama-2-7b").ropes[0].scaling, RopeScaling::Default);
        assert_eq!(config("mistral-7b").layers[0].window, Some(4096));
    }
}
