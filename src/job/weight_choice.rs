//! The choice of the form in which a generating model's matrices are in memory.
//!
//! Without `--weights`, matrices are compact where that takes fewer bytes and is not slower: a layer is read in both forms, and the
//! products of a token are timed. Where the dense model does not fit into memory, compact matrices are taken without a measurement. The
//! results are the same bits, so the choice changes speed and memory only.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;

use super::opened::OpenedModel;
use crate::bytes::ByteSize;
use crate::generation::{DecodingArithmetic, Generator};
use crate::linalg::linear::SingleToken;
use crate::linalg::{Linear, ProductContext};
use crate::model::{DecoderLayer, KeptShares, WeightForm, WeightForms};
use crate::placement::{Residency, Sizes};
use crate::run::Events;
use crate::settings::WeightChoice;

/// Passes over a layer in each form; the fastest counts.
const PASSES: usize = 5;

/// The forms of a model's matrices, and where its layers rest.
pub(super) struct SettledWeights {
    pub forms: WeightForms,
    pub residency: Residency,
}

/// Sizes of a model, and the memory for it.
pub(super) struct MemoryRoom {
    pub sizes: Sizes,
    pub budget: ByteSize,
}

/// Settles the form of the matrices and the place of the layers, and tells the choice.
///
/// # Arguments
/// * `room`: the sizes with dense matrices, and the memory that may be used
///
/// # Errors
/// Fails when a matrix cannot be read, and where a single layer does not fit.
pub(super) fn settle(
    model: &OpenedModel,
    choice: WeightChoice,
    arithmetic: DecodingArithmetic,
    MemoryRoom { sizes, budget }: MemoryRoom,
    events: &dyn Events,
) -> Result<SettledWeights> {
    let settled = |forms: WeightForms, sizes: &Sizes| -> Result<SettledWeights> {
        Ok(SettledWeights { residency: Residency::settle(sizes, budget)?, forms })
    };
    if choice == WeightChoice::Dense {
        return settled(WeightForms::dense(), &sizes);
    }
    let shares = KeptShares::sampled(&*model.source, &model.config)?;
    let dtype = model.dtypes().layers;
    let form = choice.form().unwrap_or(WeightForm::Compact);
    let zeros = shares.zeros(&model.config);
    let forms = WeightForms::new(form, shares);
    let compact = Generator::sizes_in(&model.config, dtype, &forms, sizes);
    let share = format!("{:.0} % of the weights are 0", 100.0 * zeros);
    if compact.layer >= sizes.layer {
        if choice != WeightChoice::Auto {
            events.note(format!("weights      dense: {share}, so {} is not smaller", form.name()));
        }
        return settled(WeightForms::dense(), &sizes);
    }
    let all = |sizes: &Sizes| ByteSize(sizes.layer.0 * sizes.layers as u64);
    let bytes = format!("layers take {} instead of {}", all(&compact), all(&sizes));
    if choice != WeightChoice::Auto {
        events.note(format!("weights      {}: {bytes}, {share}", form.name()));
        return settled(forms, &compact);
    }
    let dense_fits = Residency::settle(&sizes, budget).is_ok_and(|rest| rest.streamed() == 0);
    if !dense_fits {
        events.note(format!("weights      compact: {bytes}, which do not fit; {share}"));
        return settled(forms, &compact);
    }
    let times = times_as_fast(model, &forms, arithmetic)?;
    let measured = format!("{times:.2} times as fast as dense here");
    if times < 1.0 {
        events.note(format!("weights      dense: compact is {measured}, and {bytes}"));
        return settled(WeightForms::dense(), &sizes);
    }
    events.note(format!("weights      compact: {bytes}, {measured}; {share}"));
    settled(forms, &compact)
}

/// Times the products of a token with the matrices of the first layer, without and with their zeros.
fn times_as_fast(
    model: &OpenedModel,
    forms: &WeightForms,
    arithmetic: DecodingArithmetic,
) -> Result<f64> {
    let (source, config) = (&*model.source, &model.config);
    let layers =
        [DecoderLayer::load(source, config, 0)?, DecoderLayer::load_in(source, config, 0, forms)?];
    let mut context = ProductContext::new();
    context.products = arithmetic.products;
    let ids: Vec<_> = layers[0].linear_ids().collect();
    let widest =
        |size: fn(&Linear) -> usize| ids.iter().map(|&id| size(layers[0].linear(id))).max();
    let x = vec![1.0; widest(Linear::in_features).unwrap_or(0)];
    let mut out = vec![0.0; widest(Linear::out_features).unwrap_or(0)];
    let mut best = [f64::INFINITY; 2];
    for _ in 0..PASSES {
        for (layer, best) in layers.iter().zip(&mut best) {
            let began = Instant::now();
            for &id in &ids {
                let linear = layer.linear(id);
                let (x, out) = (&x[..linear.in_features()], &mut out[..linear.out_features()]);
                linear.forward(x, out, SingleToken::MatrixVector, &mut context)?;
            }
            black_box(&out);
            *best = best.min(began.elapsed().as_secs_f64());
        }
    }
    Ok(best[0] / best[1])
}
