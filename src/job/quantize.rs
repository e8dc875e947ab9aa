//! `prune quantize`: settle → scales → outputs → pass → finish.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use safetensors::Dtype;
use serde_json::Value;

use super::conversion::ConversionFolder;
use super::folder::RunFolder;
use super::folder::state_file::StateFile;
use super::located::{self, OpenedWeights};
use super::machine;
use super::published::SourceCards;
use super::recorder::Recorder;
use super::same_run::RunIdentity;
use super::tensor_files::TensorFiles;
use crate::bytes::{ByteSize, json_file};
use crate::checkpoint::{
    CARD_FILE, CHUNK_BYTES, CONFIG_FILE, Checkpoint, INDEX_FILE, Published, WeightSource,
    check_sidecars, is_of_text_model, sidecars_in,
};
use crate::failure::Failure;
use crate::model::{DecoderLayer, ModelConfig, text_settings};
use crate::placement::Inventory;
use crate::placement::cpu_budget;
use crate::quantized::{
    FourBitFormat, LEAST_PIECE, PIECE, Quantization, QuantizeJournal, QuantizePass, config,
    pass_bytes,
};
use crate::report::cards::{self, CardModel};
use crate::run::manifest::name_of;
use crate::run::plan::{MemoryPart, PartKind, PhasePlan, TimeEstimate};
use crate::run::{Event, Events, Phase, Plan, QuantizationReport, Unfinished};
use crate::runtime::{Clock, Reporter};
use crate::settings::{ModelSettings, QuantizeSettings};

/// Quantises the decoder linears of a checkpoint and writes the result. Continues a quantisation that was interrupted.
///
/// # Errors
/// Fails for a folder that is no checkpoint or is quantised already, for an output folder with files in it, for weights that are not
/// finite, without room on the disk, and where files cannot be read or written.
pub fn quantize(settings: &QuantizeSettings, events: &dyn Events) -> Result<QuantizationReport> {
    let recorder = Recorder::new(events);
    let clock = Clock::new();
    let started = machine::unix_seconds();
    let job = QuantizeJob::settle(settings, &recorder)?;
    crate::report::plan::announce(&job.plan, &recorder);
    recorder.emit(Event::IfInterrupted(Some(Unfinished::resumable(
        "matrices",
        &settings.output.save,
        "quantisation",
        &settings.output.arguments,
    ))));
    let state = job.identity.state(&settings.output.arguments, started);
    let (known, mut finished) = (state.quantized.clone(), state.tensors.clone());
    let folder = job.folder.model_folder()?;
    let mut state = StateFile::begin(folder, state, &clock, &recorder, started)?;
    let pass = clock.measure(Phase::Quantize, || {
        let (format, piece) = (settings.to, job.piece);
        let quantization = Quantization { source: &job.checkpoint, format, piece };
        QuantizePass::new(quantization, &job.matrices, known, &mut state, &recorder)
    });
    let mut pass = pass?;
    let layout = pass.layout()?;
    let bytes_after = layout.bytes();
    let files = TensorFiles {
        folder: &job.folder,
        layout: &layout,
        sources: vec![&job.source],
        reporter: Reporter { clock: &clock, events: &recorder },
        work: ["quantisation", "written"],
    };
    let writer =
        files.open(&mut finished, || state.matrix_done(pass.known(), Some(BTreeMap::new())))?;
    let totals = clock.measure(Phase::Quantize, || pass.run(&writer, &mut state, &recorder))?;
    let mut report = QuantizationReport {
        prune_version: env!("CARGO_PKG_VERSION").to_string(),
        model: job.source.display().to_string(),
        output: folder.display().to_string(),
        format: settings.to.name().to_string(),
        totals,
        bytes_before: job.checkpoint.total_bytes(),
        bytes_after,
        plan: job.plan.clone(),
        phases: Vec::new(),
        peak_anonymous: None,
    };
    let published = published(&job, settings.to, &report)?;
    clock.measure(Phase::SaveAndVerify, || writer.finish(published, &[], &recorder))?;
    state.remove()?;
    recorder.emit(Event::IfInterrupted(None));
    (report.phases, report.peak_anonymous) = recorder.measured(&clock, &job.plan);
    Ok(report)
}

/// A quantisation that is settled: everything that can be wrong before weights are read is checked, and nothing is written.
struct QuantizeJob {
    source: PathBuf,
    /// The source's id on the hub; `None` for a folder.
    id: Option<String>,
    /// The source's `config.json`.
    json: Value,
    checkpoint: Arc<Checkpoint>,
    /// The tensor names of the decoder linears.
    matrices: BTreeSet<String>,
    folder: RunFolder,
    identity: RunIdentity,
    /// Weights that are read at once.
    piece: usize,
    plan: Plan,
}

impl QuantizeJob {
    fn settle(settings: &QuantizeSettings, events: &dyn Events) -> Result<Self> {
        let (source, hub_model) =
            located::model(&ModelSettings::of(&settings.output.model), events)?;
        let json = located::dense_json(&source)?;
        if json.get(config::KEY).is_some_and(|value| !value.is_null()) {
            return Err(Failure::new(format!(
                "`{}` is quantised already",
                source.display()
            ))
            .detail("its config.json has a `quantization_config`")
            .hint("name the unquantised checkpoint: prune quantize --to nf4-double DENSE --save OUT")
            .into());
        }
        let model = ModelConfig::of_json(&source, &json)?;
        let checkpoint = OpenedWeights::open(&source, events)?.checkpoint;
        for layer in 0..model.num_hidden_layers {
            DecoderLayer::check(&*checkpoint, &model, layer)?;
        }
        check_sidecars(&source)?;
        let threads = machine::start_workers(settings.output.threads)?;
        let matrices: BTreeSet<String> = model.linear_names().collect();
        let (piece, plan) = planned(settings, &checkpoint, &matrices, threads)?;
        let deciding = vec![
            ("command", "quantize".to_string()),
            ("to", settings.to.name().to_string()),
            ("source", checkpoint.fingerprint()?),
            ("config", json.to_string()),
        ];
        let ConversionFolder { folder, identity } =
            ConversionFolder::open(&settings.output, &source, deciding, events)?;
        Ok(Self {
            source,
            id: hub_model.map(|hub| hub.id),
            json,
            checkpoint,
            matrices,
            piece,
            plan,
            folder,
            identity,
        })
    }
}

/// The program, its lists of tensors and the stacks of its threads.
const PROGRAM: ByteSize = ByteSize(8 << 20);

/// Weights that a thread of a recent CPU quantises in a second.
const WEIGHTS_PER_SECOND: f64 = 1e8;

/// The piece that fits, and the plan.
///
/// # Errors
/// Fails where the smallest piece does not fit, with the bytes that are enough.
fn planned(
    settings: &QuantizeSettings,
    checkpoint: &Checkpoint,
    matrices: &BTreeSet<String>,
    threads: usize,
) -> Result<(usize, Plan)> {
    let inventory = Inventory::here(threads);
    let budget = cpu_budget(&inventory, &settings.output.budget());
    let entries = || matrices.iter().filter_map(|name| checkpoint.entry(name));
    let sizes = entries().map(|entry| (entry.elements(), entry.bytes as usize));
    let (largest, bytes) = sizes.max().unwrap_or_default();
    let read_back = PROGRAM + ByteSize(CHUNK_BYTES as u64);
    let of_pass = |piece| PROGRAM + pass_bytes(largest, bytes / largest.max(1), piece);
    let mut piece = PIECE;
    while budget.is_some_and(|budget| of_pass(piece) > budget) && piece > LEAST_PIECE {
        piece /= 2;
    }
    let peak = of_pass(piece).max(read_back);
    if let Some(budget) = budget.filter(|budget| peak > *budget) {
        let least = settings.output.budget().with_cpu(of_pass(LEAST_PIECE).max(read_back));
        return Err(Failure::new(format!("this quantisation does not fit into {budget}"))
            .detail(format!("at least {peak} are needed"))
            .hint(format!("use --max-memory {least}"))
            .into());
    }
    let phase = |phase, bytes: ByteSize| {
        let part = |kind, bytes| MemoryPart { kind, bytes };
        let pieces = ByteSize(bytes.0 - PROGRAM.0);
        let parts = vec![part(PartKind::Program, PROGRAM), part(PartKind::TensorPieces, pieces)];
        PhasePlan::on_cpu(phase, parts)
    };
    let reads = match settings.to {
        FourBitFormat::Nf4 => 1,
        FourBitFormat::Nf4Double => 2,
    };
    let weights: usize = entries().map(|entry| entry.elements()).sum();
    let matrix_bytes: u64 = entries().map(|entry| entry.bytes).sum();
    let read = checkpoint.total_bytes().0 + (reads - 1) * matrix_bytes;
    // The output is written and read back; most of it has a quarter of its bytes.
    let written = 2 * (checkpoint.total_bytes().0 - matrix_bytes + matrix_bytes / 4);
    let compute = reads as f64 * weights as f64 / WEIGHTS_PER_SECOND;
    let disk = (read + written) as f64 / (inventory.rates.disk_gb_s * 1e9);
    let phases =
        vec![phase(Phase::Quantize, of_pass(piece)), phase(Phase::SaveAndVerify, read_back)];
    let time = TimeEstimate::overlapped(compute, disk);
    Ok((piece, Plan::on_cpu(budget, phases, time, format!("pieces of {piece} weights"))))
}

/// The modules beside the linears of the text model in a model of several media: its parts for other media, and the head. transformers
/// puts some parts into its module `model`, so both names are given.
fn modules_beside(checkpoint: &Checkpoint) -> Vec<String> {
    let beside = checkpoint.tensors().filter(|entry| !is_of_text_model(&entry.name));
    let mut modules: BTreeSet<String> = beside
        .filter_map(|entry| {
            let name = entry.name.strip_prefix("model.").unwrap_or(&entry.name);
            name.split_once('.').map(|(module, _)| module.to_string())
        })
        .flat_map(|module| [format!("model.{module}"), module])
        .collect();
    modules.insert("lm_head".to_string());
    modules.into_iter().collect()
}

/// The files beside the weights: the source's, with a `config.json` that names the quantisation, and a card.
fn published(
    job: &QuantizeJob,
    format: FourBitFormat,
    report: &QuantizationReport,
) -> Result<Published> {
    let dtype = job.matrices.first();
    let dtype = dtype.and_then(|name| job.checkpoint.entry(name));
    let dtype = dtype.map_or(Dtype::F32, |entry| entry.dtype);
    let mut json = job.json.clone();
    let skipped = text_settings(&json).map(|_| modules_beside(&job.checkpoint));
    json[config::KEY] = config::quantization_config(format, dtype, skipped);
    let sidecars = sidecars_in(&job.source)?.into_iter();
    let sidecars = sidecars.filter(|name| name != CONFIG_FILE && name != INDEX_FILE);
    let cards = SourceCards::of(&job.source, false);
    let id = job.id.as_deref();
    let name = name_of(id.unwrap_or(&report.model));
    let card =
        cards::quantized(report, CardModel { name: &name, id }, cards.source(std::iter::empty()));
    let sidecars = sidecars.map(|name| (job.source.join(&name), name));
    Ok(Published {
        written: vec![(CONFIG_FILE, json_file(&json)?), (CARD_FILE, card.text().into_bytes())],
        copied: sidecars.chain(cards.copied).collect(),
        has_own_sums: false,
    })
}
