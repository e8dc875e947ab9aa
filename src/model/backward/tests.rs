//! Gradients of layers and heads with waves for weights: against candle's autograd, with one thread and many, and the memory formula.

use candle_core::{DType, Device, Tensor, Var};
use serde_json::json;

use super::super::differentiable::{DifferentiableModel, Weights, loss};
use super::super::{Head, LayerContext, ModelConfig};
use super::*;
use crate::checkpoint::Checkpoint;
use crate::model::layer::sizes::{backward_elements, kept_elements};
use crate::model::{DecoderLayer, LinearId};
use crate::run::MemorySettings;

const SEQLEN: usize = 150;

/// A config of odd shapes.
fn config(family: &str, more: serde_json::Value) -> serde_json::Value {
    let mut json = json!({"model_type": family, "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 64,
        "tie_word_embeddings": false});
    for (key, value) in more.as_object().unwrap() {
        json[key] = value.clone();
    }
    json
}

fn wave(count: usize, pace: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * pace).sin()).collect()
}

/// A checkpoint with one layer: weights of the size that makes attention uneven.
fn checkpoint(config: &ModelConfig) -> (tempfile::TempDir, Checkpoint, Weights) {
    let mut weights = Weights::new();
    let mut add = |name: String, shape: &[usize]| {
        let count = shape.iter().product();
        let mut values = wave(count, 0.1 + 0.37 * (weights.len() + 1) as f32);
        let scale = if shape.len() == 1 { 0.5 } else { 0.4 };
        values.iter_mut().for_each(|value| *value *= scale);
        weights.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    };
    for id in config.linears() {
        let (rows, columns) = id.shape(config);
        add(id.tensor_name(0), &[rows, columns]);
        if config.has_bias(id) {
            add(id.bias_name(0), &[rows]);
        }
    }
    for (role, name) in config.family.norm_names(0) {
        add(name, &[config.layer(0).norm_width(role)]);
    }
    add("model.norm.weight".into(), &[config.hidden_size]);
    for name in ["lm_head.weight", "model.embed_tokens.weight"] {
        add(name.into(), &[config.vocab_size, config.hidden_size]);
    }
    let folder = tempfile::tempdir().unwrap();
    let all = weights.clone().into_iter().collect();
    candle_core::safetensors::save(&all, folder.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint, weights)
}

/// The norm of the difference over the norm.
fn apart(got: &[f32], exact: &Tensor) -> f64 {
    let exact: Vec<f32> = exact.flatten_all().unwrap().to_vec1().unwrap();
    assert_eq!(got.len(), exact.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = got.iter().zip(&exact);
    norm(&mut pairs.map(|(got, exact)| f64::from(got - exact)))
        / norm(&mut exact.iter().map(|x| f64::from(*x)))
}

fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_vec(values.to_vec(), shape, &Device::Cpu).unwrap()
}

/// The gradients of a layer by this room: of its input, and of its weights.
fn ours(
    layer: &DecoderLayer,
    context: &mut LayerContext,
    x: &Tensor,
    dy: &Tensor,
) -> (Vec<f32>, LayerGradients) {
    let mut gradients = LayerGradients::new(layer, layer.linear_ids()).with_norms(layer);
    let dx = layer.backward(x, dy, &mut gradients, context).unwrap();
    (dx.flatten_all().unwrap().to_vec1().unwrap(), gradients)
}

#[test]
fn gradients_of_any_layer_are_those_of_candles_autograd() {
    let scalings = [
        ("llama", json!({})),
        ("llama", json!({"attention_bias": true, "mlp_bias": true, "head_dim": 10})),
        ("llama", json!({"num_key_value_heads": 1})),
        (
            "llama",
            json!({"num_key_value_heads": 6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ),
        ("llama", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})),
        (
            "llama",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        ),
        (
            "llama",
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
        ),
        ("mistral", json!({"sliding_window": 48})),
        (
            "qwen2",
            json!({"use_sliding_window": true, "max_window_layers": 0, "sliding_window": 20}),
        ),
        ("qwen3", json!({"head_dim": 10})),
        ("qwen3", json!({"head_dim": 8, "attention_bias": true})),
        (
            "gemma2",
            json!({"head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 30, "attn_logit_softcapping": 3.0}),
        ),
        ("gemma3_text", json!({"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 30})),
        (
            "phi3",
            json!({"partial_rotary_factor": 0.5, "sliding_window": 40, "num_key_value_heads": 2, "rope_scaling":
                {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]}}),
        ),
        ("olmo2", json!({"num_key_value_heads": 3})),
        (
            "smollm3",
            json!({"no_rope_layers": [0], "use_sliding_window": true, "sliding_window": 33}),
        ),
    ];
    for (family, more) in scalings {
        let json = config(family, more);
        let config = ModelConfig::from_json(&json).unwrap();
        let (_folder, checkpoint, weights) = checkpoint(&config);
        let layer = DecoderLayer::load(&checkpoint, &config, 0).unwrap();
        let shape = [SEQLEN, config.hidden_size];
        let x = tensor(&wave(SEQLEN * config.hidden_size, 0.77), &shape);
        let dy = tensor(&wave(SEQLEN * config.hidden_size, 0.31), &shape);
        let settings = MemorySettings { mlp_tokens: 70, ..MemorySettings::default() };
        let mut context = LayerContext::with_settings(&config, SEQLEN, settings);
        let (dx, gradients) = ours(&layer, &mut context, &x, &dy);

        let model = DifferentiableModel::new(&config, SEQLEN).unwrap();
        let variables: std::collections::BTreeMap<String, Var> = weights
            .iter()
            .map(|(name, weight)| (name.clone(), Var::from_tensor(weight).unwrap()))
            .collect();
        let weights: Weights = variables
            .iter()
            .map(|(name, variable)| (name.clone(), variable.as_tensor().clone()))
            .collect();
        let input = Var::from_tensor(&x).unwrap();
        let y = model.layer(&weights, 0, input.as_tensor(), 1).unwrap();
        let store = (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        // Both are f32. Measured: at most 4e-5, and 2e-4 for the norms of heads, whose terms of all tokens and heads nearly cancel.
        let assert_close = |got: &[f32], name: &str, exact: &Tensor| {
            let apart = apart(got, exact);
            let is_of_heads = name.contains("self_attn.") && name.ends_with("_norm.weight");
            let allowed = if is_of_heads { 1e-3 } else { 1e-4 };
            assert!(apart < allowed, "{json}: {name} differs by {apart:e}");
        };
        assert_close(&dx, "the input", store.get(input.as_tensor()).unwrap());
        let of = |name: &str| store.get(&weights[name]).unwrap().clone();
        for id in config.linears() {
            let name = id.tensor_name(0);
            assert_close(gradients.weight(id).unwrap(), &name, &of(&name));
        }
        for (role, name) in config.family.norm_names(0) {
            assert_close(gradients.norm(role).unwrap(), &name, &of(&name));
        }
    }
}

#[test]
fn the_head_gives_candles_loss_and_gradient_in_any_chunks() {
    let config = ModelConfig::from_json(&config("llama", json!({}))).unwrap();
    let (_folder, checkpoint, weights) = checkpoint(&config);
    let head = Head::load(&checkpoint, &config).unwrap();
    let hidden = tensor(&wave(SEQLEN * 48, 0.77), &[SEQLEN, 48]);
    let targets: Vec<Option<u32>> =
        (0..SEQLEN as u32).map(|token| (token % 3 != 2).then_some(token * 7 % 130)).collect();
    let counted: Vec<u32> = (0..SEQLEN as u32).filter(|token| token % 3 != 2).collect();
    let ids: Vec<u32> = counted.iter().map(|token| token * 7 % 130).collect();
    let variable = Var::from_tensor(&hidden).unwrap();
    let rows = Tensor::new(counted.as_slice(), &Device::Cpu).unwrap();
    let x = variable.as_tensor().index_select(&rows, 0).unwrap();
    let mean = x.sqr().unwrap().mean_keepdim(1).unwrap();
    let root = (mean + config.rms_norm_eps).unwrap().sqrt().unwrap();
    let normed = x.broadcast_div(&root).unwrap();
    let normed = normed.broadcast_mul(&weights["model.norm.weight"]).unwrap();
    let logits = normed.matmul(&weights["lm_head.weight"].t().unwrap()).unwrap();
    let ids = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
    let mean = loss(&logits, &ids).unwrap();
    let store = mean.backward().unwrap();
    let exact = store.get(variable.as_tensor()).unwrap();
    let mean = f64::from(mean.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap());
    for rows in [SEQLEN, 64] {
        let settings = MemorySettings {
            logits_bytes: crate::bytes::ByteSize::of(rows * 130, 4),
            ..MemorySettings::default()
        };
        let mut context = LayerContext::with_settings(&config, SEQLEN, settings);
        let scale = 1.0 / counted.len() as f32;
        let (sum, gradient) = head.loss_gradient(&hidden, &targets, scale, &mut context).unwrap();
        assert!((sum / counted.len() as f64 / mean - 1.0).abs() < 1e-6, "{sum} {mean}");
        let gradient: Vec<f32> = gradient.flatten_all().unwrap().to_vec1().unwrap();
        assert!(apart(&gradient, exact) < 2e-5);
    }
    let mut context = LayerContext::new(&config, SEQLEN);
    let beyond = vec![Some(130); SEQLEN];
    let error = head.loss_gradient(&hidden, &beyond, 1.0, &mut context);
    assert!(error.unwrap_err().to_string().contains("token 130"));
}

#[test]
fn threads_do_not_change_a_bit_and_samples_add_up() {
    let config = ModelConfig::from_json(&config("llama", json!({}))).unwrap();
    let (_folder, checkpoint, _) = checkpoint(&config);
    let layer = DecoderLayer::load(&checkpoint, &config, 0).unwrap();
    let x = tensor(&wave(SEQLEN * 48, 0.77), &[SEQLEN, 48]);
    let dy = tensor(&wave(SEQLEN * 48, 0.31), &[SEQLEN, 48]);
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let mut context = LayerContext::new(&config, SEQLEN);
        pool.unwrap().install(|| ours(&layer, &mut context, &x, &dy))
    };
    let ((dx, mut one), (dx_of_many, many)) = (on(1), on(8));
    assert!(dx == dx_of_many);
    for (role, _) in layer.norms() {
        assert!(one.norm(role) == many.norm(role), "{role:?}");
    }
    for id in config.linears() {
        assert!(one.weight(id) == many.weight(id), "{id:?}");
    }
    // The same sample again: twice the gradient, to the rounding of sums.
    let mut context = LayerContext::new(&config, SEQLEN);
    layer.backward(&x, &dy, &mut one, &mut context).unwrap();
    for (twice, once) in
        one.weight(LinearId::UP).unwrap().iter().zip(many.weight(LinearId::UP).unwrap())
    {
        assert!((twice - 2.0 * once).abs() < 1e-3 * (1.0 + once.abs()), "{twice} {once}");
    }
    let pruned = vec![0xff; 48 * 76 / 8];
    one.mask(LinearId::UP, &pruned);
    assert!(one.weight(LinearId::UP).unwrap().iter().all(|g| g.to_bits() == 0));
    one.clear();
    for (role, _) in layer.norms() {
        assert!(one.norm(role).unwrap().iter().all(|g| *g == 0.0));
    }
}

#[test]
fn kept_activations_change_no_bit() {
    let more = json!({"attention_bias": true, "mlp_bias": true});
    let config = ModelConfig::from_json(&config("llama", more)).unwrap();
    let (_folder, checkpoint, _) = checkpoint(&config);
    let layer = DecoderLayer::load(&checkpoint, &config, 0).unwrap();
    let shape = [SEQLEN, config.hidden_size];
    let x = tensor(&wave(SEQLEN * config.hidden_size, 0.77), &shape);
    let dy = tensor(&wave(SEQLEN * config.hidden_size, 0.31), &shape);
    let values = |tensor: &Tensor| -> Vec<f32> { tensor.flatten_all().unwrap().to_vec1().unwrap() };
    for mlp_tokens in [MemorySettings::default().mlp_tokens, 80] {
        let settings = MemorySettings { mlp_tokens, ..MemorySettings::default() };
        let mut context = LayerContext::with_settings(&config, SEQLEN, settings);
        let (dx, gradients) = ours(&layer, &mut context, &x, &dy);
        let y = layer.forward(&x, &mut context).unwrap();
        let spare = layer.forward_keeping(&dy, None, &mut context).unwrap().1;
        let kept = layer.forward_keeping(&x, Some(spare), &mut context);
        let (kept_y, mut kept) = kept.unwrap();
        assert_eq!(values(&kept_y), values(&y));
        let mut of_kept = LayerGradients::new(&layer, layer.linear_ids()).with_norms(&layer);
        let kept_dx = layer.backward_kept(&x, &dy, &mut kept, &mut of_kept, &mut context);
        assert_eq!(values(&kept_dx.unwrap()), dx);
        for id in layer.linear_ids() {
            assert_eq!(of_kept.weight(id), gradients.weight(id));
        }
        for (role, _) in layer.norms() {
            assert_eq!(of_kept.norm(role), gradients.norm(role));
        }
    }
}

#[test]
fn frozen_matrices_have_no_gradient_and_wrong_shapes_are_refused() {
    let config = ModelConfig::from_json(&config("llama", json!({}))).unwrap();
    let (_folder, checkpoint, _) = checkpoint(&config);
    let layer = DecoderLayer::load(&checkpoint, &config, 0).unwrap();
    let mut gradients = LayerGradients::new(&layer, [LinearId::Q]);
    let mut context = LayerContext::new(&config, SEQLEN);
    let x = tensor(&wave(SEQLEN * 48, 0.77), &[SEQLEN, 48]);
    layer.backward(&x, &x, &mut gradients, &mut context).unwrap();
    assert!(gradients.linear_ids().eq([LinearId::Q]) && !gradients.has_norms());
    assert!(gradients.weight(LinearId::Q).unwrap().iter().any(|g| *g != 0.0));
    let short = tensor(&wave(48, 0.1), &[1, 48]);
    let error = layer.backward(&x, &short, &mut gradients, &mut context);
    assert!(error.unwrap_err().to_string().contains("[1, 48]"));
    // Computed by hand: 150·(2·48 + 2·48 + 2·16) + max(70·(2·48 + 3·76), 150·(4·48 + 2·16)), with two parts of 75 tokens.
    assert_eq!(
        backward_elements(&config, SEQLEN, 80, false),
        150 * (96 + 96 + 32) + 150 * (192 + 32)
    );
    assert_eq!(backward_elements(&config, SEQLEN, 80, true), 150 * 48 + 150 * (192 + 32));
    assert_eq!(kept_elements(&config, SEQLEN), 150 * (96 + 32 + 48 + 152));
}
