//! `prune plan --generate`: the memory of text generation for each form of the weights, from a checkpoint or a published shape.
//!
//! The zeros of a folder are estimated as `prune generate` estimates them, from some rows of every matrix. `--sparsity-ratio` states the
//! zeros of a model that is not pruned yet. The sizes are the sizes that `prune generate` settles with.

use anyhow::Result;

use super::located::OpenedWeights;
use super::opened::check_seqlen;
use super::plan::{Subject, inventory};
use crate::bytes::ByteSize;
use crate::generation::{DecodingArithmetic, Generator, SequenceShape};
use crate::model::shapes::SHAPES;
use crate::model::{KeptShares, WeightForm, WeightForms};
use crate::placement::{Residency, USABLE};
use crate::report::generation_plan::GenerationRow;
use crate::run::Events;
use crate::runtime::memory;
use crate::settings::{PlanSettings, PlanSubject};

/// The share of zeros where neither a flag nor a checkpoint's folder says it.
const ASSUMED_ZEROS: f64 = 0.5;

/// Plans text generation by the models of the settings, a row per model and form.
///
/// # Errors
/// Fails when the checkpoint cannot be read, and for more tokens than the model has positions.
pub fn generation_table(
    settings: &PlanSettings,
    events: &dyn Events,
) -> Result<Vec<GenerationRow>> {
    let cpu = inventory(settings)?.cpu;
    let subjects = match &settings.subject {
        PlanSubject::Table => SHAPES.iter().map(Subject::of).collect::<Result<_>>()?,
        _ => vec![Subject::of_settings(settings, events)?],
    };
    // As `prune generate` takes it.
    let usable = cpu.memory.map(|memory| ByteSize((memory.0 as f64 * USABLE) as u64));
    let given = settings.run.device.budget().cpu();
    let budget = given.or(usable).unwrap_or(ByteSize(u64::MAX));
    let mut rows = Vec::new();
    for subject in subjects {
        let Subject { name, config, dtypes, .. } = subject;
        let capacity = check_seqlen(settings.run.seqlen, &config)?;
        let folder = &settings.run.model.model;
        let is_folder = settings.subject == PlanSubject::Model && folder.is_dir();
        let shares = match settings.zeros {
            None if is_folder => {
                KeptShares::sampled(&*OpenedWeights::open(folder, events)?.source(), &config)?
            }
            zeros => KeptShares::uniform(&config, 1.0 - zeros.unwrap_or(ASSUMED_ZEROS)),
        };
        let arithmetic = DecodingArithmetic::default();
        let shape = SequenceShape { capacity, threads: cpu.threads, arithmetic };
        let held = memory::resident().map_or(ByteSize::ZERO, |resident| resident.anonymous);
        let dense = Generator::sizes(&config, dtypes, shape, held);
        for form in [WeightForm::Dense, WeightForm::Compact, WeightForm::Int8] {
            let forms = WeightForms::new(form, shares.clone());
            let sizes = match form {
                WeightForm::Dense => dense,
                _ => Generator::sizes_in(&config, dtypes, &forms, dense, capacity),
            };
            let residency = Residency::settle(&sizes, budget).ok();
            let weights = ByteSize(sizes.layer.0 * sizes.layers as u64) + sizes.head;
            rows.push(GenerationRow {
                model: name.clone(),
                form: form.name(),
                zeros: shares.zeros(&config),
                weights,
                kv_cache: sizes.kv_cache,
                peak: weights + sizes.kv_cache + sizes.workspace + sizes.held,
                streamed: residency.map(|of| of.streamed()),
            });
        }
    }
    Ok(rows)
}
