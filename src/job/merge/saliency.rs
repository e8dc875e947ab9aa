//! Activation statistics of a merge: the models that are measured, their texts and plans, and the file.
//!
//! `--saliency base` needs the base model's statistics, `--saliency experts` the statistics of every model but the base. With
//! `--saliency-file` alone, the statistics of that file serve the output errors of the record, and nothing is measured.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::models::{InputModelFiles, InputModels, put_on};
use super::resolved::ResolvedMerge;
use super::saliency_file::{Measurement, SaliencyFile};
use crate::bytes::ByteSize;
use crate::data::DatasetSpec;
use crate::failure::Failure;
use crate::job::folder::RunFolder;
use crate::job::inputs::RunInputs;
use crate::job::model_report::arithmetic;
use crate::job::opened::{OpenedModel, check_seqlen};
use crate::job::pass::{early_shape, settle_pass};
use crate::job::planned::Planning;
use crate::job::settled_run::SettledRun;
use crate::model::{DecoderLayer, InputMap, ModelConfig, stored_dtypes};
use crate::pipeline::activations::SquareSumsKind;
use crate::pipeline::{Observed, RunShape};
use crate::run::Events;
use crate::run::merging::{MeasuredActivations, SaliencyReport};
use crate::settings::{DeviceChoice, MergeSettings, ModelSettings, SaliencySource, Settings};

/// The file of the statistics in a run folder.
const FILE: &str = "saliency.safetensors";

/// Memory of the changes of an adapter while its model is measured.
const ADAPTER_CACHE: ByteSize = ByteSize(64 << 20);

/// The statistics of a merge, settled.
pub(super) struct Saliency {
    pub(super) path: PathBuf,
    /// The file as it was found.
    pub(super) found: SaliencyFile,
    /// The models whose statistics the merge needs, the base first.
    pub(super) asked: Vec<Asked>,
    /// The configurations of all models.
    pub(super) configs: Vec<ModelConfig>,
    pub(super) source: Option<SaliencySource>,
}

/// A model whose statistics the merge needs.
pub(super) struct Asked {
    pub(super) measurement: Measurement,
    /// The run that measures; `None` where the file has the statistics.
    pub(super) job: Option<Box<SettledRun>>,
}

/// A model to measure, before its files are looked at.
struct Wish {
    /// Its index in the recipe.
    model: usize,
    dataset: DatasetSpec,
}

impl Saliency {
    /// Finds the statistics that the merge needs: in the file, or by measurements that can begin. `None` for a merge without any.
    ///
    /// # Errors
    /// Fails for flags that contradict the recipe, for a file whose statistics do not fit, and for everything that can be wrong with
    /// models and texts.
    pub(super) fn settle(
        settings: &MergeSettings,
        merge: &ResolvedMerge,
        folder: &RunFolder,
        events: &dyn Events,
    ) -> Result<Option<Self>> {
        if settings.saliency.is_none() && settings.saliency_file.is_none() {
            return Ok(None);
        }
        let inputs = &merge.inputs;
        let wishes = wishes(settings, merge)?;
        let path = path_of(settings, folder)?;
        let configs = inputs.models.iter().map(|model| ModelConfig::load(&model.folder));
        let configs = configs.collect::<Result<Vec<_>>>()?;
        let measurements = wishes.iter().map(|wish| {
            measurement(settings, wish, &inputs.models[wish.model], &configs[wish.model])
        });
        let measurements = measurements.collect::<Result<Vec<_>>>()?;
        let found = SaliencyFile::read(&path).and_then(|file| {
            let file = file.unwrap_or_default();
            check(&file, &measurements, inputs, &configs, &path)?;
            Ok(file)
        });
        let found = match found {
            // --force replaces the file only in the run folder.
            Err(_) if settings.force && settings.saliency_file.is_none() => SaliencyFile::default(),
            found => found?,
        };
        let kept = kept_bytes(&found, &wishes, &configs);
        let mut asked = Vec::with_capacity(wishes.len());
        for (wish, mut measurement) in wishes.iter().zip(measurements) {
            let mut job = None;
            if found.asked(&measurement, &path)?.is_none() {
                let input = &inputs.models[wish.model];
                let run = measuring_run(settings, wish, input, folder);
                let settled = measuring_job(run, input, kept, events)
                    .with_context(|| format!("measuring the activations of `{}`", input.spec))?;
                measurement.of_run(&settled)?;
                job = Some(settled);
            }
            asked.push(Asked { measurement, job });
        }
        Ok(Some(Self { path, found, asked, configs, source: settings.saliency }))
    }

    /// Everything about the statistics that decides the outcome, for a merge without any, too.
    pub(super) fn deciding(saliency: Option<&Self>) -> [(String, String); 2] {
        let source = saliency.and_then(|saliency| saliency.source);
        let asked = saliency.iter().flat_map(|saliency| &saliency.asked);
        let statistics: Vec<String> = asked
            .map(|asked| {
                let of = &asked.measurement;
                format!(
                    "{} x {} tokens of {}, seed {}",
                    of.nsamples, of.seqlen, of.dataset, of.seed
                )
            })
            .collect();
        let none = || "none".to_string();
        [
            ("saliency", source.map_or_else(none, |of| of.name().to_string())),
            (
                "statistics",
                match statistics.is_empty() {
                    true => none(),
                    false => statistics.join("; "),
                },
            ),
        ]
        .map(|(name, value)| (name.to_string(), value))
    }

    /// The measurements that begin.
    pub(super) fn jobs(&self) -> impl Iterator<Item = &SettledRun> {
        self.asked.iter().filter_map(|asked| asked.job.as_deref())
    }

    /// Tells the statistics.
    pub(super) fn announce(&self, events: &dyn Events) {
        for asked in &self.asked {
            let of = &asked.measurement;
            events.note(format!(
                "activations  {}: {} samples of {} tokens of {}{}",
                of.model,
                of.nsamples,
                of.seqlen,
                of.dataset,
                match asked.job {
                    Some(_) => String::new(),
                    None => format!(", from `{}`", self.path.display()),
                }
            ));
        }
    }

    /// Bytes of the statistics in memory during the merge.
    pub(super) fn bytes(&self) -> ByteSize {
        // The file as it was read, with all models in it, and the vectors that tensors share.
        let all = self.configs.iter().map(bytes_of);
        let bytes: ByteSize = all.sum();
        bytes + bytes.max(found_bytes(&self.found))
    }

    /// The statistics, in the record. `used` are the measurements that the merge used.
    pub(super) fn report(&self, used: &[Measurement]) -> SaliencyReport {
        SaliencyReport {
            of: self.source.map(|source| source.name().to_string()),
            file: self.path.display().to_string(),
            models: used
                .iter()
                .map(|of| MeasuredActivations {
                    model: of.model.clone(),
                    dataset: of.dataset.clone(),
                    nsamples: of.nsamples,
                    seqlen: of.seqlen,
                    seed: of.seed,
                })
                .collect(),
        }
    }
}

/// The models to measure, the base first, each with its text.
fn wishes(settings: &MergeSettings, merge: &ResolvedMerge) -> Result<Vec<Wish>> {
    let ResolvedMerge { recipe, inputs, .. } = merge;
    let base = merge.base();
    let mut models = Vec::new();
    if settings.saliency == Some(SaliencySource::Base) {
        let none = || match &recipe.base_model {
            None => Failure::usage("--saliency base needs a base model, and this recipe has none")
                .hint("name it with --base, or as `base_model` in the recipe"),
            Some(base) => Failure::usage(format!(
                "--saliency base needs the base model, and {} does not read `{base}`",
                recipe.merge_method
            ))
            .hint("use a method that subtracts the base, such as task_arithmetic"),
        };
        models.push(base.ok_or_else(none)?);
    }
    if settings.saliency == Some(SaliencySource::Experts) {
        let experts = (0..inputs.models.len()).filter(|model| Some(*model) != base);
        models.extend(experts);
    }
    let (given, count) = (settings.dataset.len(), models.len());
    if count > 0 && given != 1 && given != count {
        let names = models.iter().map(|model| &inputs.models[*model].spec);
        let names: Vec<String> = names.map(ToString::to_string).collect();
        return Err(Failure::usage(format!(
            "--dataset is given {given} times, and {count} models are measured"
        ))
        .detail(names.join(", "))
        .hint("give it once for all models, or once for each in this order")
        .into());
    }
    let datasets = settings.dataset.iter().cycle();
    Ok(models
        .into_iter()
        .zip(datasets)
        .map(|(model, dataset)| Wish { model, dataset: dataset.clone() })
        .collect())
}

/// The file: as given, else in the run folder.
fn path_of(settings: &MergeSettings, folder: &RunFolder) -> Result<PathBuf> {
    if let Some(path) = &settings.saliency_file {
        return Ok(path.clone());
    }
    let run = folder.run.as_ref().filter(|run| Some(*run) != folder.model.as_ref());
    let none = || {
        Failure::usage("the statistics need a place")
            .detail("a file beside the weights of a model would be loaded with them")
            .hint("add --save DIR or --saliency-file FILE")
    };
    Ok(run.ok_or_else(none)?.join(FILE))
}

/// Everything that decides the statistics of a model and is known without its text.
fn measurement(
    settings: &MergeSettings,
    wish: &Wish,
    input: &InputModelFiles,
    config: &ModelConfig,
) -> Result<Measurement> {
    for layer in 0..config.num_hidden_layers {
        DecoderLayer::check(&*input.checkpoint, config, layer)?;
    }
    Ok(Measurement {
        model: input.spec.to_string(),
        fingerprint: input.fingerprint()?,
        dataset: wish.dataset.to_string(),
        nsamples: settings.nsamples,
        seqlen: check_seqlen(settings.seqlen, config)? as u64,
        seed: settings.seed,
        dtype: stored_dtypes(&*input.checkpoint, config).layers.name().to_string(),
        num_hidden_layers: config.num_hidden_layers,
        tokens_sha256: String::new(),
        arithmetic: String::new(),
    })
}

/// Refuses a file whose statistics do not fit the models.
fn check(
    file: &SaliencyFile,
    measurements: &[Measurement],
    inputs: &InputModels,
    configs: &[ModelConfig],
    path: &Path,
) -> Result<()> {
    let mut is_known = false;
    for (input, config) in inputs.models.iter().zip(configs) {
        if let Some(model) = file.find(&input.fingerprint()?) {
            model.check(config, path)?;
            is_known |= model.is_complete() || !measurements.is_empty();
        }
    }
    for asked in measurements {
        file.asked(asked, path)?;
    }
    let there: Vec<&str> =
        file.models.iter().map(|model| model.measurement.model.as_str()).collect();
    if is_known || (there.is_empty() && !measurements.is_empty()) {
        return Ok(());
    }
    let failure = match there.is_empty() {
        true => Failure::new(format!("there are no statistics in `{}`", path.display()))
            .hint("add --saliency base or --saliency experts, which measures them"),
        false => Failure::new(format!("`{}` holds statistics of other models", path.display()))
            .detail(format!("measured: {}", there.join(", ")))
            .detail("models are compared by their weights, not by their names")
            .hint("name another --saliency-file; a file that does not exist is written"),
    };
    Err(failure.into())
}

/// Bytes of the statistics of a model.
fn bytes_of(config: &ModelConfig) -> ByteSize {
    let columns: usize = config.input_widths().values().sum();
    ByteSize::of(columns * config.num_hidden_layers, size_of::<f32>())
}

/// Bytes of the statistics of all models, and of the file while it is written.
fn kept_bytes(found: &SaliencyFile, wishes: &[Wish], configs: &[ModelConfig]) -> ByteSize {
    let wishes = wishes.iter().map(|wish| bytes_of(&configs[wish.model]));
    let bytes = found_bytes(found) + wishes.sum();
    bytes + bytes
}

/// Bytes of the vectors of a file.
fn found_bytes(found: &SaliencyFile) -> ByteSize {
    let vectors =
        found.models.iter().flat_map(|model| model.layers.iter().flat_map(InputMap::values));
    vectors.map(|means| ByteSize::of(means.len(), size_of::<f32>())).sum()
}

/// The settings of the run that measures a model.
fn measuring_run(
    settings: &MergeSettings,
    wish: &Wish,
    input: &InputModelFiles,
    folder: &RunFolder,
) -> Settings {
    let mut run = settings.measuring(ModelSettings {
        cache_dir: settings.cache_dir.clone(),
        ..ModelSettings::of(&input.folder)
    });
    run.arguments.clone_from(&settings.arguments);
    run.calibration = Some(settings.calibration(wish.dataset.clone()));
    run.device.offload_folder = run.device.offload_folder.or_else(|| folder.run.clone());
    run
}

/// The run that measures a model, settled. The CPU measures a model for which the named GPUs have no room.
fn measuring_job(
    mut run: Settings,
    input: &InputModelFiles,
    mut kept: ByteSize,
    events: &dyn Events,
) -> Result<Box<SettledRun>> {
    let mut model = OpenedModel::open(&run.model, &run.device, run.seqlen, events)?;
    if let Some(adapter) = &input.adapter {
        kept = kept + ADAPTER_CACHE + ByteSize(adapter.largest_change_bytes());
        put_on(&mut model, (**adapter).clone())?;
    }
    let observes = Some(Observed { kind: Some(&SquareSumsKind), kept });
    if run.device.names_a_gpu() {
        let folder = RunFolder::at(&[&*model.folder], &run.output, false)?;
        let shape = early_shape(&run, &model, None, &RunInputs::default(), &folder);
        let shape = RunShape { observes, ..shape };
        if !Planning::new(&run.device, model.threads)?.has_room(&shape)? {
            events.note(format!(
                "a GPU has too little memory for calibration: the CPU measures `{}`",
                input.spec
            ));
            run.device.device = DeviceChoice::Auto;
        }
    }
    settle_pass(run, model, observes, events)
}

impl Measurement {
    /// Adds the tokens and the arithmetic of the run that measures.
    fn of_run(&mut self, run: &SettledRun) -> Result<()> {
        let samples = run.texts.calibration.as_ref().context("a measurement has samples")?;
        let arithmetic = arithmetic(&run.model, &run.settings.device, &run.plan);
        self.tokens_sha256.clone_from(&samples.protocol.tokens_sha256);
        self.arithmetic = format!("{} by {}", arithmetic.dtype, arithmetic.kernel);
        Ok(())
    }
}
