//! Shapes of published models by name, for plans without a checkpoint. The numbers come from the models' `config.json`.

use serde_json::{Value, json};

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
    /// Further keys of `config.json`, as the inside of a JSON object.
    settings: &'static str,
}

const fn shape_of(
    name: &'static str,
    model_type: &'static str,
    dtype: StoredDtype,
    numbers: [usize; 7],
    settings: &'static str,
) -> Shape {
    Shape { name, model_type, dtype, numbers, settings }
}

const BF16: StoredDtype = StoredDtype::Bf16;
const F16: StoredDtype = StoredDtype::F16;

/// Settings that several models share.
const TIED: &str = r#""tie_word_embeddings": true, "rope_theta": 1e6"#;
const THETA_1M: &str = r#""rope_theta": 1e6"#;
const LLAMA_3: &str = r#""rope_theta": 5e5"#;
const LLAMA_3_1: &str = r#""rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#;
const LLAMA_3_2: &str = r#""tie_word_embeddings": true, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 32.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#;
const OLMO_2: &str = r#""rope_theta": 5e5, "rms_norm_eps": 1e-6"#;
const GEMMA_3: &str =
    r#""sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}"#;

/// All shapes, smallest first.
pub const SHAPES: [Shape; 45] = [
    shape_of(
        "gemma-3-270m",
        "gemma3_text",
        BF16,
        [640, 2048, 18, 4, 1, 262_144, 32_768],
        r#""head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512"#,
    ),
    shape_of("qwen2.5-0.5b", "qwen2", BF16, [896, 4864, 24, 14, 2, 151_936, 32_768], TIED),
    shape_of("qwen3-0.6b", "qwen3", BF16, [1024, 3072, 28, 16, 8, 151_936, 40_960], TIED),
    shape_of(
        "gemma-3-1b",
        "gemma3_text",
        BF16,
        [1152, 6912, 26, 4, 1, 262_144, 32_768],
        r#""sliding_window": 512"#,
    ),
    shape_of("tinyllama-1.1b", "llama", BF16, [2048, 5632, 22, 32, 4, 32_000, 2048], ""),
    shape_of("llama-3.2-1b", "llama", BF16, [2048, 8192, 16, 32, 8, 128_256, 131_072], LLAMA_3_2),
    shape_of("olmo-2-1b", "olmo2", BF16, [2048, 8192, 16, 16, 16, 100_352, 4096], OLMO_2),
    shape_of("qwen2.5-1.5b", "qwen2", BF16, [1536, 8960, 28, 12, 2, 151_936, 32_768], TIED),
    shape_of("qwen3-1.7b", "qwen3", BF16, [2048, 6144, 28, 16, 8, 151_936, 40_960], TIED),
    shape_of("gemma-2-2b", "gemma2", BF16, [2304, 9216, 26, 8, 4, 256_000, 8192], ""),
    shape_of(
        "smollm3-3b",
        "smollm3",
        BF16,
        [2048, 11_008, 36, 16, 4, 128_256, 65_536],
        r#""rope_theta": 5000000.0"#,
    ),
    shape_of("qwen2.5-3b", "qwen2", BF16, [2048, 11_008, 36, 16, 2, 151_936, 32_768], TIED),
    shape_of("llama-3.2-3b", "llama", BF16, [3072, 8192, 28, 24, 8, 128_256, 131_072], LLAMA_3_2),
    shape_of(
        "phi-3-mini",
        "phi3",
        BF16,
        [3072, 8192, 32, 32, 32, 32_064, 4096],
        r#""sliding_window": 2047"#,
    ),
    shape_of(
        "phi-4-mini",
        "phi3",
        BF16,
        [3072, 8192, 32, 24, 8, 200_064, 131_072],
        r#""tie_word_embeddings": true, "partial_rotary_factor": 0.75, "sliding_window": 262144"#,
    ),
    shape_of(
        "gemma-3-4b",
        "gemma3_text",
        BF16,
        [2560, 10_240, 34, 8, 4, 262_208, 131_072],
        GEMMA_3,
    ),
    shape_of("qwen3-4b", "qwen3", BF16, [2560, 9728, 36, 32, 8, 151_936, 40_960], TIED),
    shape_of("llama-2-7b", "llama", F16, [4096, 11_008, 32, 32, 32, 32_000, 4096], ""),
    shape_of(
        "mistral-7b",
        "mistral",
        BF16,
        [4096, 14_336, 32, 32, 8, 32_000, 32_768],
        r#""sliding_window": 4096"#,
    ),
    shape_of("olmo-2-7b", "olmo2", BF16, [4096, 11_008, 32, 32, 32, 100_352, 4096], OLMO_2),
    shape_of("qwen2.5-7b", "qwen2", BF16, [3584, 18_944, 28, 28, 4, 152_064, 131_072], THETA_1M),
    shape_of("llama-3-8b", "llama", BF16, [4096, 14_336, 32, 32, 8, 128_256, 8192], LLAMA_3),
    shape_of("llama-3.1-8b", "llama", BF16, [4096, 14_336, 32, 32, 8, 128_256, 131_072], LLAMA_3_1),
    shape_of("qwen3-8b", "qwen3", BF16, [4096, 12_288, 36, 32, 8, 151_936, 40_960], THETA_1M),
    shape_of("gemma-2-9b", "gemma2", BF16, [3584, 14_336, 42, 16, 8, 256_000, 8192], ""),
    shape_of(
        "gemma-3-12b",
        "gemma3_text",
        BF16,
        [3840, 15_360, 48, 16, 8, 262_208, 131_072],
        GEMMA_3,
    ),
    shape_of(
        "mistral-nemo",
        "mistral",
        BF16,
        [5120, 14_336, 40, 32, 8, 131_072, 131_072],
        r#""head_dim": 128, "sliding_window": null, "rope_theta": 1000000.0"#,
    ),
    shape_of("llama-2-13b", "llama", F16, [5120, 13_824, 40, 40, 40, 32_000, 4096], ""),
    shape_of("olmo-2-13b", "olmo2", BF16, [5120, 13_824, 40, 40, 40, 100_352, 4096], OLMO_2),
    shape_of(
        "phi-3-medium",
        "phi3",
        BF16,
        [5120, 17_920, 40, 40, 10, 32_064, 4096],
        r#""sliding_window": 2047"#,
    ),
    shape_of(
        "phi-4",
        "phi3",
        BF16,
        [5120, 17_920, 40, 40, 10, 100_352, 16_384],
        r#""rope_theta": 250000.0"#,
    ),
    shape_of("qwen3-14b", "qwen3", BF16, [5120, 17_408, 40, 40, 8, 151_936, 40_960], THETA_1M),
    shape_of("qwen2.5-14b", "qwen2", BF16, [5120, 13_824, 48, 40, 8, 152_064, 131_072], THETA_1M),
    shape_of(
        "mistral-small-24b",
        "mistral",
        BF16,
        [5120, 32_768, 40, 32, 8, 131_072, 32_768],
        r#""head_dim": 128, "sliding_window": null, "rope_theta": 100000000.0"#,
    ),
    shape_of(
        "gemma-3-27b",
        "gemma3_text",
        BF16,
        [5376, 21_504, 62, 32, 16, 262_208, 131_072],
        r#""head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}"#,
    ),
    shape_of(
        "gemma-2-27b",
        "gemma2",
        BF16,
        [4608, 36_864, 46, 32, 16, 256_000, 8192],
        r#""head_dim": 128, "query_pre_attn_scalar": 144"#,
    ),
    shape_of("olmo-2-32b", "olmo2", BF16, [5120, 27_648, 64, 40, 8, 100_352, 4096], OLMO_2),
    shape_of("llama-30b", "llama", F16, [6656, 17_920, 60, 52, 52, 32_000, 2048], ""),
    shape_of("qwen3-32b", "qwen3", BF16, [5120, 25_600, 64, 64, 8, 151_936, 40_960], THETA_1M),
    shape_of("qwen2.5-32b", "qwen2", BF16, [5120, 27_648, 64, 40, 8, 152_064, 131_072], THETA_1M),
    shape_of("llama-2-70b", "llama", F16, [8192, 28_672, 80, 64, 8, 32_000, 4096], ""),
    shape_of("llama-3-70b", "llama", BF16, [8192, 28_672, 80, 64, 8, 128_256, 8192], LLAMA_3),
    shape_of(
        "llama-3.1-70b",
        "llama",
        BF16,
        [8192, 28_672, 80, 64, 8, 128_256, 131_072],
        LLAMA_3_1,
    ),
    shape_of("qwen2.5-72b", "qwen2", BF16, [8192, 29_568, 80, 64, 8, 152_064, 131_072], THETA_1M),
    shape_of(
        "llama-3.1-405b",
        "llama",
        BF16,
        [16_384, 53_248, 126, 128, 8, 128_256, 131_072],
        LLAMA_3_1,
    ),
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
        let mut config = json!({
            "model_type": self.model_type,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": positions,
        });
        let settings: Value = serde_json::from_str(&format!("{{{}}}", self.settings))?;
        for (key, value) in settings.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        ModelConfig::from_json(&config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::RopeScaling;

    #[test]
    fn shapes_have_the_parameters_their_models_are_published_with() {
        // Counted from the published checkpoints.
        let published = [
            ("gemma-3-270m", 268_098_176u64),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen3-0.6b", 596_049_920),
            ("gemma-3-1b", 999_885_952),
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-3.2-1b", 1_235_814_400),
            ("olmo-2-1b", 1_484_916_736),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen3-1.7b", 1_720_574_976),
            ("gemma-2-2b", 2_614_341_888),
            ("smollm3-3b", 3_075_098_624),
            ("qwen2.5-3b", 3_085_938_688),
            ("llama-3.2-3b", 3_212_749_824),
            ("phi-3-mini", 3_821_079_552),
            ("phi-4-mini", 3_836_021_760),
            ("gemma-3-4b", 3_880_263_168),
            ("qwen3-4b", 4_022_468_096),
            ("llama-2-7b", 6_738_415_616),
            ("mistral-7b", 7_241_732_096),
            ("olmo-2-7b", 7_298_617_344),
            ("qwen2.5-7b", 7_615_616_512),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3.1-8b", 8_030_261_248),
            ("qwen3-8b", 8_190_735_360),
            ("gemma-2-9b", 9_241_705_984),
            ("gemma-3-12b", 11_766_034_176),
            ("mistral-nemo", 12_247_782_400),
            ("llama-2-13b", 13_015_864_320),
            ("olmo-2-13b", 13_716_198_400),
            ("phi-3-medium", 13_960_238_080),
            ("phi-4", 14_659_507_200),
            ("qwen3-14b", 14_768_307_200),
            ("qwen2.5-14b", 14_770_033_664),
            ("mistral-small-24b", 23_572_403_200),
            ("gemma-3-27b", 27_009_346_304),
            ("gemma-2-27b", 27_227_128_320),
            ("olmo-2-32b", 32_234_279_936),
            ("llama-30b", 32_528_943_616),
            ("qwen3-32b", 32_762_123_264),
            ("qwen2.5-32b", 32_763_876_352),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3-70b", 70_553_706_496),
            ("llama-3.1-70b", 70_553_706_496),
            ("qwen2.5-72b", 72_706_203_648),
            ("llama-3.1-405b", 405_853_388_800),
        ];
        let counted = SHAPES.map(|shape| {
            let config = shape.config().unwrap();
            let elements = config.tensors().map(|tensor| tensor.shape.iter().product::<usize>());
            (shape.name, elements.sum::<usize>() as u64)
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
