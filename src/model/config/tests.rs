//! Tests of the configuration.

use super::*;
use serde_json::json;

fn tiny() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
        "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 512})
}

fn with(key: &str, value: Value) -> Value {
    let mut config = tiny();
    config[key] = value;
    config
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = ModelConfig::from_json(&tiny()).unwrap();
    assert_eq!(
        (config.num_key_value_heads, config.head_dim, config.max_position_embeddings),
        (8, 8, 2048)
    );
    let rope = Rope { theta: 10_000.0, scaling: RopeScaling::Default, dims: 8 };
    assert_eq!(config.ropes, [rope]);
    assert!(!config.tie_word_embeddings && config.biases.is_empty());
}

#[test]
fn rotary_scaling_is_read_under_the_old_and_the_new_key() {
    let llama3 = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let old = ModelConfig::from_json(&with("rope_scaling", llama3.clone())).unwrap();
    let mut new = llama3;
    new["rope_theta"] = json!(500_000.0);
    let new = ModelConfig::from_json(&with("rope_parameters", new)).unwrap();
    assert_eq!(old.ropes[0].scaling, new.ropes[0].scaling);
    assert_eq!(new.ropes[0].theta, 500_000.0);
    let linear =
        ModelConfig::from_json(&with("rope_scaling", json!({"type": "linear", "factor": 2.0})))
            .unwrap();
    assert_eq!(linear.ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn a_sparsity_config_of_weights_that_are_stored_dense_loads() {
    let of = |settings: Value| {
        let mut quantization = json!({"quant_method": "compressed-tensors", "format": "dense",
            "config_groups": {}, "kv_cache_scheme": null,
            "sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}});
        for (key, value) in settings.as_object().unwrap() {
            quantization[key.as_str()] = value.clone();
        }
        ModelConfig::from_json(&with("quantization_config", quantization))
    };
    assert_eq!(of(json!({})).unwrap(), ModelConfig::from_json(&tiny()).unwrap());
    assert!(of(json!({"config_groups": null})).is_ok());
    for refused in [
        json!({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}),
        json!({"kv_cache_scheme": {"num_bits": 8}}),
        json!({"sparsity_config": {"format": "sparse-bitmask"}}),
        json!({"quant_method": "gptq"}),
    ] {
        let found = of(refused.clone()).unwrap_err().to_string();
        assert!(found.contains("the checkpoint is quantised"), "{refused}: {found}");
    }
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let refusals = [
        (
            with("architectures", json!(["GPT2LMHeadModel"])),
            "the architecture `GPT2LMHeadModel` is not supported",
        ),
        (
            with("model_type", json!("qwen2")),
            "the architecture `LlamaForCausalLM` of model type `qwen2` is not supported",
        ),
        (
            with("rope_scaling", json!({"rope_type": "proportional", "factor": 2.0})),
            "rotary scaling `proportional` is not supported",
        ),
        (
            with("rope_scaling", json!({"rope_type": "linear"})),
            "`rope_scaling.factor` is null; it must be a number from 1 to 1e12",
        ),
        (
            with("quantization_config", json!({"quant_method": "gptq"})),
            "the checkpoint is quantised (gptq)",
        ),
        (with("hidden_act", json!("gelu")), "`hidden_act` is \"gelu\""),
        (with("hidden_act", json!(5)), "`hidden_act` is 5"),
        (with("hidden_size", json!(0)), "`hidden_size` is 0"),
        (with("hidden_size", json!(-5)), "`hidden_size` is -5"),
        (with("vocab_size", json!(1u64 << 60)), "`vocab_size` is"),
        (with("num_key_value_heads", json!(3)), "is not a multiple of `num_key_value_heads` 3"),
        (with("head_dim", json!(7)), "`head_dim` 7 is odd"),
        (with("hidden_size", json!(60)), "there is no `head_dim`"),
        (with("num_hidden_layers", json!(1_000_000_000)), "from 1 to 4096"),
        (with("head_dim", json!(1 << 22)), "times `head_dim` 4194304 is more than"),
        (with("rms_norm_eps", json!(0.0)), "`rms_norm_eps` is 0"),
        (with("rms_norm_eps", json!(1e-300)), "`rms_norm_eps` is 1e-300"),
        (with("rms_norm_eps", json!("x")), "`rms_norm_eps` is \"x\""),
        (with("attention_bias", json!("no")), "`attention_bias` is \"no\""),
        (with("rope_theta", json!(1e300)), "`rope_theta` is 1e+300"),
        (with("rope_scaling", json!(2.0)), "`rope_scaling` is 2.0"),
        (with("rope_scaling", json!({"type": 7})), "is 7; it must be a name"),
        (
            with("rope_scaling", json!({"type": "dynamic", "factor": 1e-300})),
            "`rope_scaling.factor` is 1e-300",
        ),
        (
            with(
                "rope_scaling",
                json!({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1.0 + 1e-12,
                "original_max_position_embeddings": 8192}),
            ),
            "must be smaller than high_freq_factor",
        ),
        (
            with(
                "rope_scaling",
                json!({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                "original_max_position_embeddings": 1e300}),
            ),
            "`original_max_position_embeddings` is 1e+300",
        ),
        (with("rope_theta", json!("x")), "`rope_theta` is \"x\""),
    ];
    for (config, message) in refusals {
        let error = ModelConfig::from_json(&config).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

fn mistral(key: &str, value: Value) -> Result<ModelConfig> {
    let mut config = with(key, value);
    config["architectures"] = json!(["MistralForCausalLM"]);
    config["model_type"] = json!("mistral");
    ModelConfig::from_json(&config)
}

#[test]
fn a_mistral_has_no_biases_and_the_defaults_of_transformers() {
    // `attention_bias` is no key of MistralConfig: transformers ignores it.
    let config = mistral("attention_bias", json!(true)).unwrap();
    assert_eq!(config.biases, []);
    // MistralConfig: num_key_value_heads=8, max_position_embeddings=4096*32, sliding_window=4096.
    assert_eq!(config.num_key_value_heads, 8);
    assert_eq!(config.max_position_embeddings, 131_072);
    assert!(config.layers.iter().all(|kind| kind.window == Some(4096)));
}

#[test]
fn layers_have_a_window_unless_it_is_null_or_the_family_has_none() {
    let windows =
        |config: &ModelConfig| config.layers.iter().map(|kind| kind.window).collect::<Vec<_>>();
    let config = mistral("sliding_window", json!(48)).unwrap();
    assert_eq!(windows(&config), [Some(48); 2]);
    assert_eq!(config.longest_sequence(), 131_072, "a window does not bound the sequence");
    let config = mistral("sliding_window", Value::Null).unwrap();
    assert_eq!(windows(&config), [None; 2]);
    let config = ModelConfig::from_json(&with("sliding_window", json!(48))).unwrap();
    assert_eq!(windows(&config), [None; 2], "a Llama has no window");
    let error = mistral("sliding_window", json!(0)).unwrap_err().to_string();
    assert!(error.contains("`sliding_window` is 0"), "{error}");
}

#[test]
fn the_configuration_is_the_same_in_both_spellings_of_rotary_parameters() {
    let old = mistral("rope_theta", json!(1e6)).unwrap();
    let new = json!({"rope_theta": 1e6, "rope_type": "default"});
    assert_eq!(old, mistral("rope_parameters", new).unwrap());
}

/// The file of a published Gemma 3 with pictures.
#[test]
fn sizes_that_a_text_config_leaves_out_are_the_familys() {
    let text = json!({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024});
    let json = json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text});
    let config = ModelConfig::from_json(&json).unwrap();
    assert_eq!(
        (config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        (8, 4, 256)
    );
    assert_eq!((config.hidden_size, config.vocab_size), (2560, 262_208));
    assert!(config.tie_word_embeddings);
    // A language model by itself must say its sizes.
    assert!(ModelConfig::from_json(&text).is_err());
}
