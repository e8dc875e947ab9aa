//! `prune unpack`: settle → outputs → pass → comparison of hashes → finish.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::conversion::ConversionFolder;
use super::folder::RunFolder;
use super::folder::state_file::StateFile;
use super::original_files::hash_of;
use super::pack_plan::PassCost;
use super::recorder::Recorder;
use super::tensor_files::TensorFiles;
use super::{located, machine};
use crate::bytes::{ByteSize, hex, json_file};
use crate::checkpoint::{
    CONFIG_FILE, Checkpoint, INDEX_FILE, Layout, Published, SUMS_FILE, cards_in, sidecars_in,
};
use crate::failure::Failure;
use crate::model::ModelConfig;
use crate::packed::record::OriginalFile;
use crate::packed::{
    PackJournal, PackedRecord, PackedSource, PackedValues, RestorePass, config, restore,
};
use crate::run::packing::UnpackingReport;
use crate::run::verification::Verification;
use crate::run::{Event, Events, Phase, Plan, Unfinished};
use crate::runtime::{Clock, Reporter};
use crate::settings::{ConversionSettings, ModelSettings};

/// Restores the folder that was packed, byte for byte. From rounded values, it writes the dense checkpoint of the rounded model. Continues
/// an unpacking that was interrupted.
///
/// # Errors
/// Fails for a folder that is not packed, for a file whose hash is not the original file's, for an output folder with files in it,
/// without room on the disk, and where files cannot be read or written. No wrong file gets its final name.
pub fn unpack(settings: &ConversionSettings, events: &dyn Events) -> Result<UnpackingReport> {
    let recorder = Recorder::new(events);
    let clock = Clock::new();
    let started = machine::unix_seconds();
    let job = UnpackJob::settle(settings, &recorder)?;
    crate::report::plan::announce(&job.plan, &recorder);
    recorder.emit(Event::IfInterrupted(Some(Unfinished::resumable(
        "matrices",
        &settings.save,
        "unpacking",
        &settings.arguments,
    ))));
    let state = job.output.identity.state(&settings.arguments, started);
    let mut finished = state.tensors.clone();
    let folder = job.folder().model_folder()?;
    let mut state = StateFile::begin(folder, state, &clock, &recorder, started)?;
    let files = TensorFiles {
        folder: job.folder(),
        layout: &job.layout,
        sources: vec![&job.source],
        reporter: Reporter { clock: &clock, events: &recorder },
        work: ["unpacking", "restored"],
    };
    let writer = files.open(&mut finished, || state.tensors_written(BTreeMap::new()))?;
    let pass = RestorePass { source: &job.packed, piece: job.piece };
    clock.measure(Phase::Unpack, || pass.run(&writer, &mut state, &recorder))?;
    let published = job.published()?;
    let is_wrong = std::cell::Cell::new(false);
    let check = |written: &Verification| {
        let checked = job.check_written(written);
        is_wrong.set(checked.is_err());
        checked
    };
    let written =
        clock.measure(Phase::SaveAndVerify, || writer.finish_if(&check, published, &[], &recorder));
    if is_wrong.get() {
        // The next process restores all matrices again, perhaps from a good folder.
        state.tensors_written(Default::default())?;
    }
    written?;
    state.remove()?;
    recorder.emit(Event::IfInterrupted(None));
    let (phases, peak) = recorder.measured(&clock, &job.plan);
    let shards = job.layout.files().len();
    let rounded = if job.packed.values() == PackedValues::Int8 { shards } else { 0 };
    let all = job.packed.record().map_or(0, |record| record.files.len());
    Ok(UnpackingReport {
        prune_version: env!("CARGO_PKG_VERSION").to_string(),
        model: job.source.display().to_string(),
        output: folder.display().to_string(),
        values: job.packed.values().name().to_string(),
        files_equal: all.saturating_sub(rounded),
        files_rounded: rounded,
        bytes_before: job.files_bytes(),
        bytes_after: job.layout.bytes(),
        plan: job.plan.clone(),
        phases,
        peak_anonymous: peak,
    })
}

/// An unpacking that is settled: everything that can be wrong before weights are read is checked, and nothing is written.
struct UnpackJob {
    source: PathBuf,
    packed: Arc<PackedSource>,
    layout: Layout,
    output: ConversionFolder,
    /// Bytes that are restored at once.
    piece: usize,
    plan: Plan,
}

impl UnpackJob {
    fn settle(settings: &ConversionSettings, events: &dyn Events) -> Result<Self> {
        let (source, _) = located::model(&ModelSettings::of(&settings.model), events)?;
        let json = ModelConfig::read_json(&source)?;
        if !config::is_packed(&json) {
            let shown = source.display();
            return Err(Failure::new(format!("`{shown}` is not packed"))
                .detail("its config.json names no layout of packed matrices")
                .hint(format!("this packs it: prune pack {shown} --save OUT"))
                .into());
        }
        let packed = Arc::new(PackedSource::open(Arc::new(Checkpoint::open(&source)?))?);
        let threads = machine::start_workers(settings.threads)?;
        let layout = match packed.record() {
            Some(record) => {
                check_others(record, &source)?;
                record.layout(packed.base())?
            }
            None => Layout::of(&packed.checkpoint()?)?,
        };
        let row_bytes = packed.matrices().values().map(|matrix| matrix.row_bytes()).max();
        let row_bytes = row_bytes.unwrap_or(0);
        let headers = layout.files().iter().map(|file| file.header.len() as u64);
        let cost = PassCost {
            name: "unpacking",
            phase: Phase::Unpack,
            memory: &|piece| restore::restore_bytes(row_bytes, piece, threads),
            held: ByteSize(3 * headers.sum::<u64>()),
            // Written and read back.
            disk: packed.base().total_bytes().0 + 2 * layout.bytes().0,
        };
        let (piece, plan) = cost.plan(settings, threads)?;
        let deciding = vec![
            ("command", "unpack".to_string()),
            ("source", packed.base().fingerprint()?),
            ("config", json.to_string()),
        ];
        let output = ConversionFolder::open(settings, &source, deciding, events)?;
        Ok(Self { source, packed, layout, output, piece, plan })
    }

    fn folder(&self) -> &RunFolder {
        &self.output.folder
    }

    /// The bytes of the packed weight files.
    fn files_bytes(&self) -> ByteSize {
        let shards = self.packed.base().shards().iter();
        shards.map(|shard| ByteSize(shard.file_bytes)).sum()
    }

    /// Compares the hashes of the written weight files with the original files'. Rounded values have no original.
    fn check_written(&self, written: &Verification) -> Result<()> {
        let Some(record) = self.packed.record() else {
            return Ok(());
        };
        if record.values == PackedValues::Int8 {
            return Ok(());
        }
        for file in &written.files {
            let original = record.files.get(&file.file).map(|original| original.sha256.as_str());
            if original != Some(&file.sha256) {
                let name = format!("`{}`", file.file);
                let hashes = format!(
                    "SHA-256 {} was packed, {} is restored",
                    original.unwrap_or("of no file"),
                    file.sha256
                );
                return Err(not_original(&name, hashes).into());
            }
        }
        Ok(())
    }

    /// The files beside the weights.
    fn published(&self) -> Result<Published> {
        let copy = |name: String| (self.source.join(&name), name);
        let Some(record) = self.packed.record() else {
            let json = located::dense_json(&self.source)?;
            let cards = cards_in(&self.source).unwrap_or_default();
            let others = sidecars_in(&self.source)?.into_iter().chain(cards);
            let others = others.filter(|name| name != CONFIG_FILE && name != INDEX_FILE);
            return Ok(Published {
                written: vec![(CONFIG_FILE, json_file(&json)?)],
                copied: others.map(copy).collect(),
                has_own_sums: false,
            });
        };
        let names = [SUMS_FILE, INDEX_FILE, CONFIG_FILE].into_iter();
        let texts =
            names.filter_map(|name| Some((name, record.texts.get(name)?.clone().into_bytes())));
        Ok(Published {
            written: texts.collect(),
            copied: record.copied().map(|(name, _)| copy(name.to_string())).collect(),
            has_own_sums: true,
        })
    }
}

/// Compares the files beside the weights with the original files.
fn check_others(record: &PackedRecord, source: &std::path::Path) -> Result<()> {
    let known = [SUMS_FILE, INDEX_FILE, CONFIG_FILE];
    let differs = |name: &str, original: &OriginalFile, found: &OriginalFile| {
        let numbers =
            |file: &OriginalFile| format!("{} bytes, SHA-256 {}", file.bytes, file.sha256);
        let why = format!("{} were packed, {} are there", numbers(original), numbers(found));
        not_original(&format!("`{name}`"), why)
    };
    for (name, text) in &record.texts {
        if !known.contains(&name.as_str()) {
            let why = "its text is in `packed.json`, which holds no such texts".to_string();
            return Err(not_original(&format!("`{name}`"), why).into());
        }
        let found = OriginalFile {
            bytes: text.len() as u64,
            sha256: hex(&Sha256::digest(text.as_bytes())),
        };
        match record.files.get(name) {
            Some(original) if *original == found => {}
            Some(original) => return Err(differs(name, original, &found).into()),
            None => {}
        }
    }
    if !record.texts.contains_key(CONFIG_FILE) {
        let why = "`packed.json` does not have its text".to_string();
        return Err(not_original(&format!("`{CONFIG_FILE}`"), why).into());
    }
    for (name, original) in record.copied() {
        let found = hash_of(&source.join(name))?;
        if *original != found {
            return Err(differs(name, original, &found).into());
        }
    }
    Ok(())
}

/// The refusal of a file that is not the packed one.
fn not_original(name: &str, why: String) -> Failure {
    Failure::new(format!("{name} would not be the file that was packed"))
        .detail(why)
        .hint("a file of the packed folder was changed: download it again, or pack the dense one again: prune pack DENSE --save OUT")
        .lasting()
}
