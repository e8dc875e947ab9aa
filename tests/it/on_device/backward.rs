//! Gradients of a layer by candle's operators and autograd against our own, for weights and factors, and for every division of the work.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::linalg::{LowRank, MaskedLowRank, StoredDtype};
use prune::model::{DecoderLayer, Head, LayerContext, LayerGradients, ModelConfig, NormRole};
use prune::runtime::engine::{Engine, OnCandle};

use super::shapes::{HIDDEN, SEQLEN, VOCABULARY, families};
use super::{model, tilings, values};
use crate::oracle::sharp;

/// Largest difference of gradients of any family, relative. Weights are large there, so that every part of a layer matters.
const FAMILIES: f64 = 2e-5;

/// The trained part of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trained {
    Weights,
    WeightsAndNorms,
    Factors,
}

fn wave(count: usize, pace: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * pace).sin()).collect()
}

/// Zeros for the gradients of what is trained.
fn zeros(trained: Trained, layer: &DecoderLayer) -> LayerGradients {
    let factors = || {
        let changes = layer.linear_ids().map(|id| {
            let linear = layer.linear(id);
            let (out, inner) = (linear.out_features(), linear.in_features());
            let bits = (out * inner).div_ceil(8);
            let pruned: Vec<u8> = (0..bits).map(|at| (at * 37 % 251) as u8).collect();
            let factors = [wave(3 * inner, 0.7), wave(out * 3, 1.3)];
            let change =
                MaskedLowRank::with_mask(LowRank::new((out, inner), factors, 0.5), pruned.into());
            (id, change)
        });
        changes.collect::<BTreeMap<_, _>>()
    };
    match trained {
        Trained::Weights => LayerGradients::new(layer, layer.linear_ids()),
        Trained::WeightsAndNorms => {
            LayerGradients::new(layer, layer.linear_ids()).with_norms(layer)
        }
        Trained::Factors => LayerGradients::of_factors(factors()),
    }
}

/// All gradients, each with its name.
fn all(gradients: &LayerGradients) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for id in gradients.linear_ids() {
        let of = gradients.weight(id).into_iter();
        let of = of.chain(gradients.factors(id).into_iter().flatten());
        all.extend(of.map(|values| (format!("{id:?}"), values.to_vec())));
    }
    for role in [
        NormRole::BeforeAttention,
        NormRole::Query,
        NormRole::Key,
        NormRole::AfterAttention,
        NormRole::BeforeMlp,
        NormRole::AfterMlp,
    ] {
        let norm = gradients.norm(role).into_iter();
        all.extend(norm.map(|values| (format!("{role:?}"), values.to_vec())));
    }
    all
}

/// The norm of the difference over the norm.
fn apart(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = got.iter().zip(expected);
    norm(&mut pairs.map(|(got, expected)| f64::from(got - expected)))
        / norm(&mut expected.iter().map(|x| f64::from(*x)))
}

/// Compares the gradients of a layer with ours. `tolerance` is the largest difference, relative.
fn compare(folder: &Path, index: usize, arithmetic: DType, tolerance: f64) -> Result<()> {
    let config = ModelConfig::load(folder)?;
    let checkpoint: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder)?);
    let mut context = LayerContext::new(&config, SEQLEN);
    let layer = DecoderLayer::load(&*checkpoint, &config, index)?;
    let mut engine = OnCandle::new(Device::Cpu, arithmetic, String::new(), &context)?;
    engine.begin(&layer)?;
    for id in layer.linear_ids() {
        engine.take_up(&layer, id)?;
    }
    let sample =
        |pace: f32| Tensor::from_vec(wave(SEQLEN * HIDDEN, pace), (SEQLEN, HIDDEN), &Device::Cpu);
    let samples = [(sample(0.77)?, sample(0.31)?), (sample(0.53)?, sample(1.9)?)];
    for trained in [Trained::Weights, Trained::WeightsAndNorms, Trained::Factors] {
        let mut expected = zeros(trained, &layer);
        let mut outputs = Vec::new();
        for (x, dy) in &samples {
            outputs.push(values(&layer.backward(x, dy, &mut expected, &mut context)?)?);
        }
        for cut in tilings(&config) {
            let family = config.family.model_type;
            let when = format!("{family}, layer {index}, {trained:?}, {arithmetic:?}, {cut:?}");
            let mut found = zeros(trained, &layer);
            for ((x, dy), output) in samples.iter().zip(&outputs) {
                let dx = values(&engine.backward(&layer, [x, dy], &mut found, &cut)?)?;
                let apart = apart(&dx, output);
                assert!(apart < tolerance, "input, {when}: {apart}");
            }
            engine.collect_gradients(&mut found)?;
            let (found, expected) = (all(&found), all(&expected));
            assert_eq!(found.len(), expected.len());
            for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                let apart = apart(found, expected);
                assert!(apart < tolerance, "{name}, {when}: {apart}");
            }
        }
    }
    Ok(())
}

#[test]
fn candles_gradients_are_ours() -> Result<()> {
    for (stored, arithmetic, tolerance) in [
        (StoredDtype::F32, DType::F32, 5e-6),
        // Every operator rounds to 8 bits: measured at most 0.11, for factors of gate.
        (StoredDtype::Bf16, DType::BF16, 0.15),
    ] {
        let folder = tempfile::tempdir()?;
        model(folder.path(), stored)?;
        compare(folder.path(), 1, arithmetic, tolerance)?;
    }
    Ok(())
}

#[test]
fn candles_gradients_are_ours_in_every_family() -> Result<()> {
    for shape in families() {
        let folder = sharp(&shape)?;
        for index in 0..shape.num_hidden_layers {
            compare(folder.path(), index, DType::F32, FAMILIES)?;
        }
    }
    Ok(())
}

/// Compares loss and gradient of the head with ours. `tolerance` is the largest difference, relative.
fn compare_head(folder: &Path, arithmetic: DType, tolerance: f64) -> Result<()> {
    let config = ModelConfig::load(folder)?;
    let checkpoint: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(folder)?);
    let mut context = LayerContext::new(&config, SEQLEN);
    let head = Head::load(&*checkpoint, &config)?;
    let mut engine = OnCandle::new(Device::Cpu, arithmetic, String::new(), &context)?;
    let chunk = head.chunk(0..head.vocab_size())?;
    engine.begin_head(&chunk)?;
    let state = wave(SEQLEN * HIDDEN, 0.77);
    let state = Tensor::from_vec(state, (SEQLEN, HIDDEN), &Device::Cpu)?;
    // Every third token has no target.
    let target = |at: usize| (!at.is_multiple_of(3)).then_some((at * 31 % VOCABULARY) as u32);
    let mut targets: Vec<Option<u32>> = (0..SEQLEN).map(target).collect();
    let (loss, gradient) = head.loss_gradient(&state, &targets, 0.01, &mut context)?;
    let [whole, small] = tilings(&config);
    for cut in [whole, small] {
        let (found, of_state) = engine.head_gradient(&chunk, &state, &targets, 0.01, &cut)?;
        let when = format!("{}, {arithmetic:?}, {cut:?}", config.family.model_type);
        assert!((found / loss - 1.0).abs() < tolerance, "{when}: {found}, {loss}");
        let apart = apart(&values(&of_state)?, &values(&gradient)?);
        assert!(apart < tolerance, "{when}: {apart}");
    }
    targets[1] = Some(307);
    let refused = engine.head_gradient(&chunk, &state, &targets, 0.01, &whole);
    assert!(refused.expect_err("a target outside").to_string().contains("vocabulary of 307"));
    Ok(())
}

#[test]
fn the_head_of_a_device_gives_our_loss_and_gradient() -> Result<()> {
    for (stored, arithmetic, tolerance) in
        [(StoredDtype::F32, DType::F32, 5e-6), (StoredDtype::Bf16, DType::BF16, 3e-2)]
    {
        let folder = tempfile::tempdir()?;
        model(folder.path(), stored)?;
        compare_head(folder.path(), arithmetic, tolerance)?;
    }
    for shape in families() {
        compare_head(sharp(&shape)?.path(), DType::F32, FAMILIES)?;
    }
    Ok(())
}
