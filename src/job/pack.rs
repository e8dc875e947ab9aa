//! `prune pack`: settle → count and hash → outputs → pass → finish.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::Result;
use serde_json::Value;

use super::conversion::ConversionFolder;
use super::folder::RunFolder;
use super::folder::state_file::StateFile;
use super::original_files::OriginalFiles;
use super::pack_plan::PassCost;
use super::recorder::Recorder;
use super::same_run::RunIdentity;
use super::tensor_files::TensorFiles;
use super::{located, machine};
use crate::bytes::{ByteSize, json_file};
use crate::checkpoint::{
    CONFIG_FILE, Checkpoint, PACKED_FILE, Published, WeightSource, check_sidecars, is_of_text_model,
};
use crate::failure::Failure;
use crate::model::{DecoderLayer, ModelConfig};
use crate::packed::record::{self, MatrixRecord, OriginalFile};
use crate::packed::{PackChoice, PackJournal, PackPass, PackScan, PackedRecord, config, pass};
use crate::run::packing::{PackingReport, ScannedFile, ScannedMatrix};
use crate::run::{Event, Events, Phase, Plan, Unfinished};
use crate::runtime::{Clock, Reporter};
use crate::settings::{ModelSettings, PackSettings};

/// Packs the decoder linears of a checkpoint and writes the result. Continues a packing that was interrupted.
///
/// # Errors
/// Fails for a folder that is no checkpoint, or is packed or quantised already; where no matrix gets smaller; for an output folder with files
/// in it, without room on the disk, and where files cannot be read or written.
pub fn pack(settings: &PackSettings, events: &dyn Events) -> Result<PackingReport> {
    let recorder = Recorder::new(events);
    let clock = Clock::new();
    let started = machine::unix_seconds();
    let output = &settings.output;
    let job = PackJob::settle(settings, &recorder)?;
    crate::report::plan::announce(&job.plan, &recorder);
    recorder.emit(Event::IfInterrupted(Some(Unfinished::resumable(
        "matrices",
        &output.save,
        "packing",
        &output.arguments,
    ))));
    let state = job.identity.state(&output.arguments, started);
    let (known, mut finished) = (state.scanned.clone(), state.tensors.clone());
    let folder = job.folder.model_folder()?;
    let mut state = StateFile::begin(folder, state, &clock, &recorder, started)?;
    let (source, matrices) = (&job.checkpoint, &job.matrices);
    let scan = PackScan { source, matrices, values: settings.values, piece: job.piece };
    let scanned = clock.measure(Phase::Pack, || scan.run(known, &mut state, &recorder));
    let scanned = scanned?;
    let choice = PackChoice::new(source, settings.values, &counts(&scanned));
    if choice.packed.is_empty() {
        // The refusal leaves nothing.
        state.remove()?;
        recorder.emit(Event::IfInterrupted(None));
        return Err(job.nothing_smaller(&choice).into());
    }
    let pass = PackPass { source, choice: &choice, piece: job.piece };
    let layout = pass.layout()?;
    let files = TensorFiles {
        folder: &job.folder,
        layout: &layout,
        sources: vec![&job.source],
        reporter: Reporter { clock: &clock, events: &recorder },
        work: ["packing", "written"],
    };
    let writer = files.open(&mut finished, || state.tensors_written(BTreeMap::new()))?;
    clock.measure(Phase::Pack, || pass.run(&writer, &mut state, &recorder))?;
    let others = OriginalFiles::of(source)?;
    let mut report = job.report(&choice, others.left_out.clone());
    report.bytes_after = layout.bytes();
    let published = job.published(&choice, &scanned, others)?;
    clock.measure(Phase::SaveAndVerify, || writer.finish(published, &[], &recorder))?;
    state.remove()?;
    recorder.emit(Event::IfInterrupted(None));
    (report.phases, report.peak_anonymous) = recorder.measured(&clock, &job.plan);
    Ok(report)
}

/// A packing that is settled: everything that can be wrong before weights are read is checked, and nothing is written.
struct PackJob {
    source: PathBuf,
    /// The source's `config.json`.
    json: Value,
    checkpoint: Checkpoint,
    /// The tensor names of the decoder linears.
    matrices: BTreeSet<String>,
    folder: RunFolder,
    identity: RunIdentity,
    /// Bytes that are read at once.
    piece: usize,
    plan: Plan,
}

impl PackJob {
    fn settle(settings: &PackSettings, events: &dyn Events) -> Result<Self> {
        let output = &settings.output;
        let (source, _) = located::model(&ModelSettings::of(&output.model), events)?;
        let json = ModelConfig::read_json(&source)?;
        refuse_compressed(&source, &json)?;
        let model = ModelConfig::of_json(&source, &json)?;
        let checkpoint = Checkpoint::open(&source)?;
        for layer in 0..model.num_hidden_layers {
            DecoderLayer::check(&checkpoint, &model, layer)?;
        }
        check_sidecars(&source)?;
        let threads = machine::start_workers(output.threads)?;
        let matrices: BTreeSet<String> = model.linear_names().collect();
        let entries = || matrices.iter().filter_map(|name| checkpoint.entry(name));
        let rows = entries().filter_map(|entry| entry.shape.first().copied()).max();
        let row_bytes = entries()
            .map(|entry| entry.bytes as usize / entry.shape.first().copied().unwrap_or(1).max(1));
        let (rows, row_bytes) = (rows.unwrap_or(0), row_bytes.max().unwrap_or(0));
        let bytes = checkpoint.total_bytes().0;
        let headers = checkpoint.shards().iter().map(|shard| shard.header.len() as u64);
        let cost = PassCost {
            name: "packing",
            phase: Phase::Pack,
            memory: &|piece| pass::pass_bytes(rows, row_bytes, piece, threads),
            // The record holds the headers, as text and as JSON.
            held: ByteSize(3 * headers.sum::<u64>()),
            // Read twice, written and read back with half of the bytes.
            disk: 3 * bytes,
        };
        let (piece, plan) = cost.plan(output, threads)?;
        let deciding = vec![
            ("command", "pack".to_string()),
            ("values", settings.values.name().to_string()),
            ("source", checkpoint.fingerprint()?),
            ("config", json.to_string()),
        ];
        let ConversionFolder { folder, identity } =
            ConversionFolder::open(output, &source, deciding, events)?;
        Ok(Self { source, json, checkpoint, matrices, folder, identity, piece, plan })
    }

    /// The refusal where no matrix gets smaller.
    fn nothing_smaller(&self, choice: &PackChoice) -> Failure {
        let [kept, all] = choice.kept;
        let failure = Failure::new(format!(
            "packing makes no matrix of `{}` smaller",
            self.source.display()
        ))
        .detail(format!(
            "{} of the {all} weights of its decoder linears are zero ({:.2} %); a mask costs a bit per weight",
            all - kept,
            100.0 * choice.sparsity()
        ));
        let failure = match choice.dense.first() {
            Some(first) => failure.detail(format!("`{}`: {}", first.tensor, first.why)),
            None => failure,
        };
        failure.hint(format!(
            "prune it first: prune --model {} --sparsity-ratio 0.5 --save OUT, then: prune pack OUT/model --save OUT-packed",
            self.source.display()
        ))
    }

    fn report(&self, choice: &PackChoice, left_out: Vec<String>) -> PackingReport {
        let shards = self.checkpoint.shards().iter();
        PackingReport {
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            model: self.source.display().to_string(),
            output: self.folder.model_folder().map_or(String::new(), |of| of.display().to_string()),
            format: choice.format().to_string(),
            values: choice.values.name().to_string(),
            totals: choice.totals,
            dense: choice.dense.clone(),
            bytes_before: shards.map(|shard| ByteSize(shard.file_bytes)).sum(),
            bytes_after: ByteSize::ZERO,
            left_out,
            plan: self.plan.clone(),
            phases: Vec::new(),
            peak_anonymous: None,
        }
    }

    /// The files beside the weights: the source's, `config.json` with the layout, and `packed.json`.
    fn published(
        &self,
        choice: &PackChoice,
        scanned: &BTreeMap<String, ScannedFile>,
        others: OriginalFiles,
    ) -> Result<Published> {
        let checkpoint = &self.checkpoint;
        let stored = |name: &str| checkpoint.stored_name(name).into_owned();
        let module = |name: &str| {
            let name = stored(name);
            name.strip_suffix(".weight").unwrap_or(&name).to_string()
        };
        let dense = choice.dense.iter().map(|matrix| matrix.tensor.as_str());
        // Parts for other media have linears, too.
        let beside = checkpoint.tensors().filter(|entry| {
            !is_of_text_model(&entry.name)
                && entry.shape.len() == 2
                && entry.name.ends_with(".weight")
        });
        let beside = beside.map(|entry| entry.name.as_str());
        let ignored: Vec<String> =
            dense.chain(["lm_head.weight"]).chain(beside).map(module).collect();
        let mut json = self.json.clone();
        json[config::KEY] = config::quantization_config(choice, choice.sparsity(), &ignored);
        let mut files = others.files;
        let mut headers = BTreeMap::new();
        for shard in checkpoint.shards() {
            let name = &shard.file_name;
            let sha256 = scanned.get(name).map_or(String::new(), |file| file.sha256.clone());
            files.insert(name.clone(), OriginalFile { bytes: shard.file_bytes, sha256 });
            headers.insert(name.clone(), String::from_utf8(shard.header.clone())?);
        }
        let matrices = choice.packed.keys().filter_map(|name| {
            let entry = checkpoint.entry(name)?;
            let shape = entry.shape.as_slice().try_into().ok()?;
            let dtype = entry.dtype.to_string();
            Some((stored(name), MatrixRecord { dtype, shape, form: choice.form }))
        });
        let record = PackedRecord {
            format: record::FORMAT,
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            values: choice.values,
            files,
            headers,
            texts: others.texts,
            matrices: matrices.collect(),
        };
        let written = vec![(CONFIG_FILE, json_file(&json)?), (PACKED_FILE, json_file(&record)?)];
        Ok(Published { written, copied: others.copied, has_own_sums: false })
    }
}

/// The counts of all matrices.
fn counts(scanned: &BTreeMap<String, ScannedFile>) -> BTreeMap<String, ScannedMatrix> {
    let matrices = scanned.values().flat_map(|file| &file.matrices);
    matrices.map(|(name, counts)| (name.clone(), *counts)).collect()
}

/// Refuses a checkpoint that is packed or quantised.
fn refuse_compressed(source: &std::path::Path, json: &Value) -> Result<()> {
    let shown = source.display();
    if config::is_packed(json) {
        return Err(Failure::new(format!("`{shown}` is packed already"))
            .hint(format!("restore its dense checkpoint: prune unpack {shown} --save OUT"))
            .into());
    }
    if json.get(config::KEY).is_some_and(|value| !value.is_null()) {
        return Err(Failure::new(format!("`{shown}` is quantised already"))
            .detail("its codes take fewer bytes than a mask with the kept values")
            .hint("name the unquantised checkpoint: prune pack DENSE --save OUT")
            .into());
    }
    Ok(())
}
