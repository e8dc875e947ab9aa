//! `prune plan`: memory per phase and device, and time, from headers alone.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::opened::check_seqlen;
use super::planned::{faster_dtype, plan as plan_run};
use super::{located, machine};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype};
use crate::model::shapes::{self, SHAPES, Shape};
use crate::model::{Dtypes, ModelConfig, WeightForms, footprint};
use crate::pipeline::{RunShape, TaskShape};
use crate::placement::device_map;
use crate::placement::{Device, Inventory, Policy, planner};
use crate::pruning::Technique;
use crate::report::plan::TableRow;
use crate::run::{Events, Plan};
use crate::settings::SparsitySettings;
use crate::settings::{ComputeDtype, PlanSettings, PlanSubject};

/// Tokens of WikiText-2's test text with the tokenizers of Llama 2 and, for vocabularies above 64 000, Llama 3. Counted.
const TEST_TOKENS: [usize; 2] = [341_469, 289_077];

/// A model to plan for.
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) config: ModelConfig,
    pub(super) dtypes: Dtypes,
    pub(super) forms: WeightForms,
}

/// A plan with the model and the machine it is for.
#[derive(Debug, Clone, Serialize)]
pub struct PlanRecord {
    /// The model's name.
    pub model: String,
    /// Weights of all its tensors.
    pub parameters: u64,
    /// Bytes of these weights as they are stored.
    #[serde(skip)]
    pub weights: ByteSize,
    /// Dtype of the decoder's weights.
    #[serde(skip)]
    pub dtype: &'static str,
    /// The run that the plan is for, in words.
    #[serde(skip)]
    pub assumed: String,
    /// The machine.
    pub inventory: Inventory,
    /// The plan.
    #[serde(flatten)]
    pub plan: Plan,
    /// The placement as `accelerate` and `--device-map` read it.
    pub device_map: Value,
}

/// Returns the names of the published shapes.
pub fn shape_names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// Plans a run without reading a weight.
pub fn plan(settings: &PlanSettings, events: &dyn Events) -> Result<PlanRecord> {
    let inventory = inventory(settings)?;
    let subject = Subject::of_settings(settings, events)?;
    let shape = run_shape(settings, &subject, inventory.cpu.threads)?;
    let policy = machine::policy(&settings.run.device)?;
    let mut plan = plan_run(&shape, &inventory, &policy)?;
    if settings.inventory.is_none() {
        let dtype = settings.run.model.dtype;
        plan.notes.extend(faster_dtype(dtype, &plan, &shape, (&inventory, &policy)));
    }
    let assumed = assumed(settings, &shape);
    let parameters = footprint::parameters(&subject.config);
    let dtype = subject.dtypes.layers;
    Ok(PlanRecord {
        model: subject.name,
        parameters,
        weights: ByteSize(parameters.saturating_mul(dtype.bytes() as u64)),
        dtype: dtype.name(),
        assumed,
        device_map: device_map::to_json(&first_devices(&plan)),
        inventory,
        plan,
    })
}

/// The method, samples and windows of the run, in words.
fn assumed(settings: &PlanSettings, shape: &RunShape<'_>) -> String {
    let run = &settings.run;
    let method = run.sparsity.as_ref().map_or("no method", |of| of.prune_method.as_str());
    let text = if run.evaluation.eval_windows.is_none() { " of WikiText-2" } else { "" };
    let windows = match shape.windows {
        0 => "no windows".to_string(),
        windows => format!("{windows} windows{text}"),
    };
    let samples = match shape.samples {
        0 => "no samples".to_string(),
        samples => format!("{samples} samples"),
    };
    format!("{method}, any ratio; {samples}, {windows}; {} tokens each", shape.seqlen)
}

/// The machine of the settings: a described machine, else this machine.
pub(super) fn inventory(settings: &PlanSettings) -> Result<Inventory> {
    let device = &settings.run.device;
    match &settings.inventory {
        Some(file) => Inventory::load(file),
        None => machine::inventory(device, machine::threads(device.threads)),
    }
}

/// The run of the settings in numbers.
pub(super) fn run_shape<'a>(
    settings: &PlanSettings,
    subject: &'a Subject,
    threads: usize,
) -> Result<RunShape<'a>> {
    let (run, config) = (&settings.run, &subject.config);
    let seqlen = check_seqlen(run.seqlen, config)?;
    let sides = run.evaluation.eval.sides();
    let text = TEST_TOKENS[usize::from(config.vocab_size > 64_000)];
    let windows = run.evaluation.eval_windows;
    let windows = windows.map_or(text / seqlen, |windows| windows as usize);
    let sparsity = run.sparsity.as_ref();
    let technique = sparsity.map(SparsitySettings::technique).transpose()?;
    let statistics = technique.as_ref().and_then(Technique::statistics);
    let calibrates = statistics.is_some();
    let calibration = run.calibration.as_ref().filter(|_| calibrates);
    Ok(RunShape {
        config,
        dtypes: subject.dtypes,
        forms: &subject.forms,
        gpu_dtype: subject.dtypes.layers,
        seqlen,
        samples: calibration.map_or(0, |calibration| calibration.nsamples as usize),
        windows: if sides.is_empty() { 0 } else { windows.max(1) },
        sides,
        tasks: TaskShape::default(),
        against: None,
        technique,
        of_all_ranks: None,
        shared_with: Vec::new(),
        flow: sparsity.map(SparsitySettings::flow).unwrap_or_default(),
        observes: None,
        trains: None,
        saves: !run.output.no_save_model,
        threads,
        products: products(settings, subject.dtypes.layers)?,
        tokenizing: ByteSize::ZERO,
        retained: ByteSize::ZERO,
        settings: None,
    })
}

/// Returns the kind of products on the CPU of the machine. A described machine does not name its CPU: `auto` means f32 there.
fn products(settings: &PlanSettings, stored: StoredDtype) -> Result<Products> {
    let dtype = settings.run.model.dtype;
    match (dtype, stored, &settings.inventory) {
        (ComputeDtype::Auto, _, Some(_)) | (ComputeDtype::F16, StoredDtype::F16, Some(_)) => {
            Ok(Products::F32)
        }
        (ComputeDtype::Bf16x3, _, Some(_)) => Ok(Products::Split),
        (ComputeDtype::Bf16, stored, Some(_)) => {
            let kernel = Kernel::best_bf16().unwrap_or(Kernel::Amx);
            Ok(machine::bf16_products(kernel, stored))
        }
        _ => machine::products(dtype, stored),
    }
}

impl Subject {
    pub(super) fn of_settings(settings: &PlanSettings, events: &dyn Events) -> Result<Self> {
        if let PlanSubject::Shape(name) = &settings.subject {
            let shape = shapes::shape(name);
            return Self::of(shape.ok_or_else(|| {
                Failure::usage(format!("there is no shape `{name}`"))
                    .hint("prune plan --table lists the shapes")
            })?);
        }
        let is_evaluated = !settings.run.evaluation.eval.sides().is_empty();
        let (config, dtypes) = located::headers(&settings.run.model, is_evaluated, events)?;
        let name = settings.run.model.model.display().to_string();
        Ok(Self { name, config, dtypes, forms: WeightForms::dense() })
    }

    pub(super) fn of(shape: &Shape) -> Result<Self> {
        Ok(Self {
            name: shape.name.to_string(),
            config: shape.config()?,
            dtypes: Dtypes::all(shape.dtype),
            forms: WeightForms::dense(),
        })
    }
}

/// One device per layer, the first where several share the samples: accelerate's maps know no sharing.
fn first_devices(plan: &Plan) -> Vec<Device> {
    let mut devices = Vec::new();
    for layers in &plan.layers {
        let name = layers.devices.first().map_or("cpu", String::as_str);
        let index = name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
        let device = index.map_or(Device::Cpu, Device::Cuda);
        devices.extend(std::iter::repeat_n(device, layers.last + 1 - layers.first));
    }
    devices
}

/// Plans every published shape: with unlimited memory, and with the least memory that works.
pub fn table(settings: &PlanSettings) -> Result<Vec<TableRow>> {
    let inventory = inventory(settings)?;
    let mut unlimited = inventory.clone();
    unlimited.cpu.memory = None;
    unlimited.gpus.clear();
    let mut rows = Vec::new();
    for shape in &SHAPES {
        let subject = Subject::of(shape)?;
        let run = run_shape(settings, &subject, inventory.cpu.threads)?;
        let parameters = footprint::parameters(&subject.config);
        let plan = planner::plan(&run, &unlimited, &Policy::default())
            .map_err(|_| Failure::new("a plan without limits does not fit"))?;
        let least = planner::least_that_works(&run);
        rows.push(TableRow {
            model: subject.name,
            parameters,
            weights: ByteSize(parameters * subject.dtypes.layers.bytes() as u64),
            hidden_states: plan.hidden_states.bytes,
            peak: plan.cpu().map(|cpu| cpu.peak).unwrap_or_default(),
            smallest_ram: least.cpu,
            smallest_gpu: least.gpu,
            ram_beside_it: least.with_gpu,
            seconds: plan.time.seconds,
        });
    }
    Ok(rows)
}
