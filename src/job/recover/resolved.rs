//! The recovery part of a run: trained parameters, teacher, optimizer and rates, resolved against the model.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use super::super::opened::OpenedModel;
use super::closing_plan::{self, ClosingPlan};
use super::given::GivenTraining;
use super::teacher::Teacher;
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::model::{KeptShares, LinearId, ModelConfig};
use crate::recovery::optimizers::{
    Hyperparameters, OPTIMIZERS, Optimizer, OptimizerKind, Schedule,
};
use crate::recovery::optimizers::{find, nearest};
use crate::recovery::{TrainedForm, TrainedPart};
use crate::run::Events;
use crate::run::verification::VerifyLevel;
use crate::settings::{
    ALL_LINEAR, ComputeDtype, DISTILL_WEIGHT, RecoverySettings, RecoveryWay, Settings, TrainedKind,
};

/// β₂ of a training whose masks close: the second moments follow the gradients of the last choices, about twenty steps.
const CLOSING_BETA2: f64 = 0.95;

/// The recovery part of a run.
pub(in crate::job) struct Recovery {
    pub(in crate::job) settings: RecoverySettings,
    /// The parameters of each layer.
    pub(super) part: TrainedPart,
    /// The dense model; `None` without a teacher.
    pub(super) teacher: Option<Teacher>,
    kind: &'static OptimizerKind,
    rate: f64,
    /// Masks that close; `None` where they stand still, and before they are settled.
    pub(in crate::job) closing: Option<ClosingPlan>,
    /// Data in place of the data that texts and seeds give.
    pub(in crate::job) given: Arc<GivenTraining>,
    /// Layers whose frozen weights stay in memory.
    pub(in crate::job) resident_layers: usize,
}

impl Recovery {
    /// Resolves the recovery part of the settings; `None` where the run does not train. GPUs do not compute gradients in f16, which
    /// underflow.
    ///
    /// # Errors
    /// Fails for contradictory settings, for a teacher that is missing, cannot be read, has the wrong shape or the weights of the
    /// model, for modules that the model does not have, and for a rank that no matrix has room for.
    pub(in crate::job) fn resolve(
        settings: &Settings,
        model: &mut OpenedModel,
        events: &dyn Events,
    ) -> Result<Option<Self>> {
        let Some(recovery) = &settings.recovery else {
            return Ok(None);
        };
        if model.gpu_dtype == StoredDtype::F16 {
            model.gpu_dtype = StoredDtype::F32;
        }
        let only_adapter = recovery.save_adapter && settings.output.no_save_model;
        if model.quantized.is_some() && (!only_adapter || recovery.base_quant.is_some()) {
            return Err(quantized_base(&model.folder, recovery).into());
        }
        let teacher = recovery.teacher.as_ref();
        let teacher = teacher.map(|folder| Teacher::open(folder, settings, model, events));
        let zeros = match recovery.lr {
            Some(_) => 0.0,
            None => KeptShares::sampled(&*model.source, &model.config)?.zeros(&model.config),
        };
        // Whole percents: some rows of every matrix are an estimate.
        let sparsity = (100.0 * zeros).round() / 100.0;
        let resolved = Self::of(recovery, (&model.config, sparsity), teacher.transpose()?)?;
        if let Some(teacher) = &resolved.teacher {
            // A dense model whose mask closes leaves its teacher with the first choice.
            let closes = recovery.closing.close_to.is_some();
            teacher.check_differs(model, &resolved.part.ids, closes, events)?;
        }
        Ok(Some(resolved))
    }

    /// A training of a model with this config and this share of zeros.
    ///
    /// # Errors
    /// Fails for an optimizer that does not exist, modules that the model does not have, and a rank that no matrix has room for.
    pub(in crate::job) fn of(
        recovery: &RecoverySettings,
        (config, sparsity): (&ModelConfig, f64),
        teacher: Option<Teacher>,
    ) -> Result<Self> {
        let kind = find(&recovery.optim).ok_or_else(|| no_optimizer(&recovery.optim))?;
        let part = TrainedPart {
            ids: ids(&recovery.target_modules, config)?,
            form: match recovery.trains {
                TrainedKind::Weights => TrainedForm::Weights,
                TrainedKind::Factors => {
                    TrainedForm::Factors { rank: recovery.rank, alpha: recovery.alpha }
                }
            },
            norms: recovery.train_norms,
        };
        check_rank(recovery, &part, config)?;
        Ok(Self {
            settings: recovery.clone(),
            part,
            teacher,
            kind,
            rate: recovery.rate(config.hidden_size, sparsity),
            closing: None,
            given: Arc::default(),
            resident_layers: 0,
        })
    }

    /// Returns whether the loss is the loss of the whole model.
    pub(in crate::job) fn is_whole(&self) -> bool {
        self.settings.how != RecoveryWay::Blocks
    }

    /// The optimizer.
    pub(super) fn optimizer(&self) -> Box<dyn Optimizer> {
        (self.kind.build)(Hyperparameters {
            weight_decay: self.settings.weight_decay,
            momentum: self.settings.momentum,
            ..match self.settings.closing.close_to {
                Some(_) => Hyperparameters { beta2: CLOSING_BETA2, ..Hyperparameters::default() },
                None => Hyperparameters::default(),
            }
        })
    }

    /// Returns whether parameters and states stay in a file.
    pub(super) fn is_paged(&self) -> bool {
        self.kind.is_paged
    }

    /// The learning rates of a training with so many examples.
    pub(super) fn schedule(&self, examples: usize) -> Schedule {
        let steps = self.settings.steps_of(examples);
        Schedule {
            shape: self.settings.schedule,
            rate: self.rate,
            warmup: self.settings.warmup_of(steps),
            steps,
        }
    }

    /// Names of the tensors that are written.
    pub(in crate::job) fn tensors(&self, config: &ModelConfig) -> Vec<String> {
        let layers = 0..config.num_hidden_layers;
        let of_layer = |layer: usize| {
            let matrices = self.part.ids.iter();
            let matrices = matrices.map(move |id| id.tensor_name(layer));
            matrices.chain(self.norms_of(layer, config))
        };
        layers.flat_map(of_layer).collect()
    }

    /// Names of the norms of a layer, if they are trained.
    pub(in crate::job) fn norms_of(&self, layer: usize, config: &ModelConfig) -> Vec<String> {
        match self.part.norms {
            true => config.family.norm_names(layer).map(|(_, name)| name).collect(),
            false => Vec::new(),
        }
    }

    /// Settings that decide the result and are no values of flags.
    pub(in crate::job) fn deciding(&self) -> Vec<(String, String)> {
        let teacher = self.teacher.as_ref();
        let of_teacher = teacher.map_or("none", |teacher| &teacher.fingerprint);
        vec![("teacher files".to_string(), of_teacher.to_string())]
    }

    /// The share of the teacher in the loss of the whole model.
    pub(super) fn distill_weight(&self) -> f64 {
        self.settings.distill_weight.unwrap_or(DISTILL_WEIGHT)
    }

    /// The teacher's folder.
    pub(in crate::job) fn teacher_folder(&self) -> Option<&Path> {
        self.teacher.as_ref().map(|teacher| &*teacher.folder)
    }
}

/// Refuses contradictory settings, and arithmetic that no backward pass exists for.
///
/// # Errors
/// Fails with exit code 2, naming the flags.
pub(super) fn check(settings: &Settings) -> Result<()> {
    if let Some(recovery) = &settings.recovery {
        check_ways(recovery, settings)?;
        check_examples(recovery, settings)?;
        closing_plan::check(recovery)?;
    }
    check_device(settings)
}

/// Refuses contradictory settings.
fn check_ways(recovery: &RecoverySettings, settings: &Settings) -> Result<()> {
    let name = recovery.how.name();
    let refused = match (recovery.how, recovery.trains) {
        (RecoveryWay::Blocks, _) if recovery.teacher.is_none() => Some((
            "--how blocks needs the dense model, whose outputs the layers learn".to_string(),
            match recovery.closing.close_to {
                Some(_) => "add --teacher DENSE, or train without one: --how full".to_string(),
                None => "add --teacher DENSE, or train without one: --how lora".to_string(),
            },
        )),
        (RecoveryWay::Blocks, _) if recovery.distill_weight.is_some() => Some((
            "--distill-weight is for --how lora and full; blocks learns from the teacher alone"
                .to_string(),
            "leave --distill-weight out".to_string(),
        )),
        _ if recovery.distill_weight.is_some() && recovery.teacher.is_none() => Some((
            format!(
                "--distill-weight of --how {name} needs the dense model, whose logits are learned"
            ),
            "add --teacher DENSE, or leave --distill-weight out".to_string(),
        )),
        (_, TrainedKind::Weights) if recovery.base_quant.is_some() => Some((
            "--base-quant needs a base that stays frozen, and all kept weights are trained"
                .to_string(),
            "train factors: --how lora, or --how blocks --train factors".to_string(),
        )),
        (_, TrainedKind::Weights) if recovery.save_adapter => Some((
            "--save-adapter needs trained factors, and all kept weights are trained".to_string(),
            "leave it out, or train factors: --how lora".to_string(),
        )),
        (RecoveryWay::Blocks, _) if recovery.save_adapter => Some((
            "--save-adapter needs --how lora: factors of blocks are merged layer by layer"
                .to_string(),
            "leave --save-adapter out, or use --how lora".to_string(),
        )),
        (RecoveryWay::Blocks, _) if recovery.base_quant.is_some() => Some((
            "--base-quant needs --how lora: blocks read each layer once".to_string(),
            "leave --base-quant out".to_string(),
        )),
        (RecoveryWay::Blocks, _) if recovery.keep_activations > 0 => Some((
            "--keep-activations is for --how lora and full; blocks keeps those of its layer anyway"
                .to_string(),
            "leave --keep-activations out".to_string(),
        )),
        _ if recovery.save_adapter && settings.output.save.is_none() => Some((
            "--save-adapter needs a run folder".to_string(),
            "add --save DIR; the adapter becomes DIR/adapter".to_string(),
        )),
        _ if recovery.save_adapter && recovery.train_norms => Some((
            "an adapter has no place for the norms that --train-norms trains".to_string(),
            "leave one of the two flags out".to_string(),
        )),
        _ if settings.output.save_masks => Some((
            "--save-masks is for a pruning method, and this command trains".to_string(),
            "leave it out: the zeros of the trained model are its masks".to_string(),
        )),
        _ if settings.output.verify == VerifyLevel::Full => Some((
            "--verify full does not fit a training: it compares kept weights with the source"
                .to_string(),
            "use --verify quick".to_string(),
        )),
        _ if recovery.patience.is_some() && recovery.held_out == 0 => Some((
            "--patience needs held-out examples".to_string(),
            "add --held-out 8, or leave --patience out".to_string(),
        )),
        _ => None,
    };
    match refused {
        None => Ok(()),
        Some((message, hint)) => Err(Failure::usage(message).hint(hint).into()),
    }
}

/// Refuses fewer examples than the held-out examples and the first step take.
fn check_examples(recovery: &RecoverySettings, settings: &Settings) -> Result<()> {
    let given = settings.calibration.as_ref().map(|draw| draw.nsamples as usize);
    let (held_out, per_step) = (recovery.held_out, recovery.per_step());
    let needed = held_out.saturating_add(per_step);
    let Some(given) = given.filter(|given| *given < needed) else {
        return Ok(());
    };
    // `blocks` draws samples, and a step may take a sample twice.
    if recovery.how == RecoveryWay::Blocks {
        return Ok(());
    }
    let mut fixes = vec![format!("use --nsamples {needed}")];
    if held_out > 0 && given >= per_step {
        fixes.push(format!("--held-out {}", given - per_step));
    } else if given > held_out {
        fixes.push(format!("--batch-size {} --accumulate 1", given - held_out));
    }
    Err(Failure::usage(format!("--nsamples {given} is too small: {needed} examples are needed"))
        .detail(format!("{held_out} are held out (--held-out), and a step takes {per_step}"))
        .hint(fixes.join(", or "))
        .into())
}

/// Refuses arithmetic that no backward pass exists for, and kept activations on a GPU.
fn check_device(settings: &Settings) -> Result<()> {
    if settings.model.dtype == ComputeDtype::F16 {
        return Err(Failure::usage("training in f16 is refused: its gradients underflow")
            .detail("f16 ends at 6e-8, and gradients of deep layers are smaller")
            .hint("use --dtype bf16, or --dtype f32")
            .into());
    }
    let keeps = settings.recovery.as_ref();
    let keeps = keeps.is_some_and(|recovery| recovery.keep_activations > 0);
    if keeps && settings.device.names_a_gpu() {
        return Err(Failure::usage(
            "--keep-activations is for the CPU; a GPU computes activations again",
        )
        .hint("leave --keep-activations out, or use --use-cpu")
        .into());
    }
    Ok(())
}

/// The refusal of an optimizer. For an optimizer of the Trainer, it names the nearest optimizer here.
fn no_optimizer(name: &str) -> Failure {
    let names: Vec<&str> = OPTIMIZERS.iter().map(|kind| kind.name).collect();
    let names = names.join(", ");
    match nearest(name) {
        Some(nearest) => Failure::usage(format!(
            "the optimizer `{name}` of transformers' Trainer does not exist here"
        ))
        .hint(format!("use --optim {nearest}, which is the nearest of {names}")),
        None => Failure::usage(format!("there is no optimizer `{name}`"))
            .hint(format!("use one of {names}")),
    }
}

fn quantized_base(folder: &Path, recovery: &RecoverySettings) -> Failure {
    if let Some(target) = recovery.closing.close_to {
        return Failure::usage(format!(
            "`{}` is quantised to 4 bits, so it has no weights that --close-to {target} could choose from",
            folder.display()
        ))
        .hint("name the checkpoint before its quantisation, and quantise the result: prune quantize");
    }
    Failure::usage(format!(
        "`{}` is quantised to 4 bits, and no model can be merged into it",
        folder.display()
    ))
    .hint("train an adapter alone, without --base-quant: --how lora --save-adapter --no-save-model; or name the unquantised checkpoint")
}

/// The matrices that are trained, in the order of a layer.
fn ids(names: &[String], config: &ModelConfig) -> Result<Vec<LinearId>> {
    let all: Vec<LinearId> = config.linears().collect();
    if let [only] = names
        && only == ALL_LINEAR
    {
        return Ok(all);
    }
    let known: Vec<&str> = all.iter().map(|id| id.module()).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(Failure::usage(format!(
            "--target-modules: a layer of this model has no `{unknown}`"
        ))
        .hint(format!("use {ALL_LINEAR}, or some of {}", known.join(",")))
        .into());
    }
    let is_named = |id: &LinearId| names.iter().any(|name| name == id.module());
    Ok(all.into_iter().filter(is_named).collect())
}

/// Refuses a rank above the smaller side of a matrix.
fn check_rank(recovery: &RecoverySettings, part: &TrainedPart, config: &ModelConfig) -> Result<()> {
    if recovery.trains == TrainedKind::Weights {
        return Ok(());
    }
    let side = |id: &LinearId| {
        let (out, inner) = id.shape(config);
        (out.min(inner), *id)
    };
    let smallest = part.ids.iter().map(side).min_by_key(|(side, _)| *side);
    let Some((side, id)) = smallest.filter(|(side, _)| recovery.rank > *side) else {
        return Ok(());
    };
    let (out, inner) = id.shape(config);
    Err(Failure::usage(format!(
        "--rank {} is above the rank of {} ({out} x {inner}), which is at most {side}",
        recovery.rank,
        id.module()
    ))
    .hint(format!("use --rank {side} or less"))
    .into())
}
