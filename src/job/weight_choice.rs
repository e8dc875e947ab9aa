//! The choice of the form in which a model's matrices are in memory, for text generation and evaluation.
//!
//! Without `--weights`, matrices of a generating model are compact where that takes fewer bytes and is not slower: a layer is read in both forms, and the
//! products of a token are timed. Where the dense model does not fit into memory, compact matrices are taken without a measurement. The
//! results are the same bits, so the choice changes speed and memory only.

use std::sync::Arc;

use anyhow::Result;

use super::opened::OpenedModel;
use super::zeros_gain::times_as_fast;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::generation::{DecodingArithmetic, Generator};
use crate::model::{DecoderLayer, KeptShares, WeightForm, WeightForms};
use crate::packed::PackedValues;
use crate::placement::{Residency, Sizes};
use crate::run::zeros_gain::speed_in_words;
use crate::run::{Events, Plan, WeightsHeld};
use crate::settings::{DeviceChoice, GenerateSettings, Settings, WeightChoice, WeightSettings};

/// The forms of a model's matrices, and where its layers rest.
pub(super) struct SettledWeights {
    pub forms: WeightForms,
    pub residency: Residency,
}

/// Sizes of a model, and the memory for it.
pub(super) struct MemoryRoom {
    pub sizes: Sizes,
    pub budget: ByteSize,
    /// Tokens of the sequence.
    pub capacity: usize,
}

/// Settles the form of the matrices and the place of the layers of a generating model, and tells the choice.
///
/// # Arguments
/// * `room`: the sizes with dense matrices, the memory that may be used, and the tokens
///
/// # Errors
/// Fails when a matrix cannot be read, and where a single layer does not fit.
pub(super) fn settle(
    model: &OpenedModel,
    settings: &GenerateSettings,
    arithmetic: DecodingArithmetic,
    MemoryRoom { sizes, budget, capacity }: MemoryRoom,
    events: &dyn Events,
) -> Result<SettledWeights> {
    let (choice, head) = (settings.weights.weights, settings.decoding.head);
    let dtypes = model.dtypes();
    let dense = WeightForms::dense().with_head(head);
    let with_dense = Generator::sizes_in(&model.config, dtypes, &dense, sizes, capacity);
    if with_dense.head < sizes.head {
        let (name, stored) = (head.name(), sizes.head);
        events.note(format!("head         {name}: {} instead of {stored}", with_dense.head));
    }
    let settled = |forms: WeightForms, sizes: &Sizes| -> Result<SettledWeights> {
        Ok(SettledWeights { residency: Residency::settle(sizes, budget)?, forms })
    };
    let Some(smaller) = SmallerForm::of(model, choice, events)? else {
        return settled(dense, &with_dense);
    };
    let SmallerForm { forms, zeros, bytes } = smaller;
    let (form, forms) = (forms.form(), forms.with_head(head));
    let name = form.name();
    let compact = Generator::sizes_in(&model.config, dtypes, &forms, sizes, capacity);
    if choice != WeightChoice::Auto || form == WeightForm::Int8 {
        events.note(format!("weights      {name}: {bytes}, {zeros}"));
        return settled(forms, &compact);
    }
    let dense_fits = Residency::settle(&with_dense, budget).is_ok_and(|rest| rest.streamed() == 0);
    if !dense_fits {
        events.note(format!("weights      {name}: {bytes}, which do not fit; {zeros}"));
        return settled(forms, &compact);
    }
    let times = of_first_layer(model, &forms, arithmetic)?;
    let measured = format!("{} as dense here", speed_in_words(times));
    if times < 1.0 {
        events.note(format!("weights      dense: {name} is {measured}, and {bytes}"));
        return settled(dense, &with_dense);
    }
    events.note(format!("weights      {name}: {bytes}, {measured}; {zeros}"));
    settled(forms, &compact)
}

/// Settles the form of the matrices of a model that is swept, where its command has a choice, and tells the choice. Without `--weights`, matrices are compact only where no
/// dense layer fits into memory: a sweep reads every layer once, and restores the rows for all tokens.
///
/// # Arguments
/// * `plan`: plans the sweep of a model
///
/// # Errors
/// Fails when a matrix cannot be read, and for a form that the device does not compute with.
pub(super) fn settle_sweep(
    model: &mut OpenedModel,
    settings: &Settings,
    plan: &dyn Fn(&OpenedModel) -> Result<Plan>,
    events: &dyn Events,
) -> Result<()> {
    let Some(WeightSettings { weights: choice, .. }) = settings.weights else {
        return Ok(());
    };
    let device = &settings.device;
    let on_gpus = matches!(device.device, DeviceChoice::Cuda(_)) || device.simulate.is_some();
    if on_gpus && matches!(choice, WeightChoice::Compact | WeightChoice::Int8) {
        return Err(Failure::usage("--weights: GPUs compute with dense matrices only")
            .hint("leave --weights out, or evaluate on the CPU with --use-cpu")
            .into());
    }
    let is_auto = choice == WeightChoice::Auto;
    let given = device.memory_settings.as_ref();
    let by_matrix = given.is_some_and(|settings| settings.weights == WeightsHeld::Matrix);
    if by_matrix && matches!(choice, WeightChoice::Compact | WeightChoice::Int8) {
        return Err(Failure::usage("--weights: matrices that stay on the disk are dense")
            .hint("leave --weights out, or `\"weights\": \"matrix\"` out of --memory-settings")
            .into());
    }
    let holds_layers = |plan: Plan| plan.memory_settings.weights == WeightsHeld::Layer;
    if is_auto && (on_gpus || by_matrix || plan(model).is_ok_and(holds_layers)) {
        return Ok(());
    }
    let choice = if is_auto { WeightChoice::Compact } else { choice };
    let Some(SmallerForm { forms, zeros, bytes }) = SmallerForm::of(model, choice, events)? else {
        return Ok(());
    };
    let form = forms.form().name();
    let dense = std::mem::replace(&mut model.forms, Arc::new(forms));
    if is_auto && plan(model).is_err() {
        model.forms = dense;
        return Ok(());
    }
    events.note(format!("weights      {form}: {bytes}, {zeros}"));
    Ok(())
}

/// A form of the matrices that takes fewer bytes than dense matrices.
struct SmallerForm {
    forms: WeightForms,
    /// The share of zeros, for a message.
    zeros: String,
    /// The memory of all layers in both forms, for a message.
    bytes: String,
}

impl SmallerForm {
    /// The form of a choice; `None` where matrices stay dense. Tells why, where another form was asked for.
    ///
    /// # Errors
    /// Fails when a matrix cannot be read.
    fn of(model: &OpenedModel, choice: WeightChoice, events: &dyn Events) -> Result<Option<Self>> {
        let has_codes = model.packed.as_ref().is_some_and(|of| of.values() == PackedValues::Int8);
        let form = match choice.form() {
            Some(WeightForm::Dense) => return Ok(None),
            Some(form) => form,
            None if has_codes => WeightForm::Int8,
            None => WeightForm::Compact,
        };
        let (config, dtype) = (&*model.config, model.dtypes().layers);
        let shares = KeptShares::sampled(&*model.source, config)?;
        let zeros = format!("{:.0} % of the weights are 0", 100.0 * shares.zeros(config));
        let forms = WeightForms::new(form, shares);
        let all = |forms: &WeightForms| {
            ByteSize(forms.layer_bytes(config, dtype).0 * config.num_hidden_layers as u64)
        };
        let (compact, dense) = (all(&forms), all(&WeightForms::dense()));
        if compact >= dense {
            if choice != WeightChoice::Auto {
                let form = form.name();
                events.note(format!("weights      dense: {zeros}, so {form} is not smaller"));
            }
            return Ok(None);
        }
        Ok(Some(Self { forms, zeros, bytes: format!("layers take {compact} instead of {dense}") }))
    }
}

/// Times the products of a token with the matrices of the first layer, without and with their zeros.
fn of_first_layer(
    model: &OpenedModel,
    forms: &WeightForms,
    arithmetic: DecodingArithmetic,
) -> Result<f64> {
    let (source, config) = (&*model.source, &model.config);
    let layers =
        [DecoderLayer::load(source, config, 0)?, DecoderLayer::load_in(source, config, 0, forms)?];
    let [dense, compact] = &layers;
    let linears = [dense, compact].map(|layer| layer.linear_ids().map(|id| layer.linear(id)));
    times_as_fast(linears, arithmetic)
}
