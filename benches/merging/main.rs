//! The merge pass against a loop that reads and writes the same bytes through the same calls, with as many threads and pieces of the
//! same size. What a merge takes beyond the loop is widening, measuring, merging and rounding.
//!
//!   cargo bench --bench merging -- BASE EXPERT EXPERT
//!
//! The models must have equal tensors, like three of `prune make-checkpoint --seed N`. Each round runs the loop and then one merge, so
//! that both find the same page cache. `OUT`: a folder for results (default: beside BASE). `ROUNDS`: 3. `METHODS`: flags of `prune merge`,
//! one set per line. Compare ratios, not seconds.
#![expect(clippy::print_stdout, reason = "the table is the result of a benchmark")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use prune::checkpoint::{
    Checkpoint, Layout, LayoutWriter, PlannedTensor, TensorEntry, WeightSource,
};
use prune::run::{Manifest, Phase, Silent};
use prune::settings::PIECE_ELEMENTS;

/// Bytes of an element in the files: f16 or bf16.
const ELEMENT: usize = 2;
/// Threads of a merge per processor.
const WORKERS_PER_THREAD: usize = 2;
/// Limit of a file of the output.
const SHARD: u64 = 5_000_000_000;

const METHODS: &str = "\
--method linear
--method passthrough
--method slerp --t 0.5
--method task_arithmetic
--method ties --density 0.5
--method ties --density 0.5 --trim-scope model
--method dare_linear --density 0.5
--method della --density 0.5
--method model_stock";

/// Reads the sources of every tensor and writes the first one's bytes; returns seconds.
fn copy(sources: &[Checkpoint], out: &Path) -> Result<f64> {
    let _ = fs::remove_dir_all(out);
    let begun = Instant::now();
    let mut tensors: Vec<&TensorEntry> = sources[0].tensors().collect();
    tensors.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
    let planned = tensors.iter().map(|entry| PlannedTensor {
        name: entry.name.clone(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
    });
    let layout = Layout::new(planned.collect(), SHARD)?;
    let writer = LayoutWriter::create(layout, out, &[], &Silent)?;
    let threads = std::thread::available_parallelism()?.get() * WORKERS_PER_THREAD;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| copy_tensors(sources, &tensors, &next, &writer)))
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no panic"))
    })?;
    writer.sync()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn copy_tensors(
    sources: &[Checkpoint],
    tensors: &[&TensorEntry],
    next: &AtomicUsize,
    writer: &LayoutWriter,
) -> Result<()> {
    let mut pieces: Vec<Vec<u8>> = vec![Vec::new(); sources.len()];
    while let Some(entry) = tensors.get(next.fetch_add(1, Ordering::Relaxed)) {
        let mut stream = writer.begin(&entry.name)?;
        let mut at = 0;
        while at < entry.bytes {
            let bytes = (entry.bytes - at).min((PIECE_ELEMENTS * ELEMENT) as u64);
            for (source, piece) in sources.iter().zip(&mut pieces) {
                let own = source.entry(&entry.name).context("models are alike")?;
                piece.resize(bytes as usize, 0);
                source.read(own, at, piece)?;
            }
            stream.write(&pieces[0])?;
            at += bytes;
        }
        stream.finish()?;
    }
    Ok(())
}

/// Runs `prune merge` and returns the seconds of its pass, and its peak of anonymous memory in MiB.
fn merge(models: &[PathBuf], method: &str, out: &Path) -> Result<(f64, f64)> {
    let _ = fs::remove_dir_all(out);
    let mut command = Command::new(env!("CARGO_BIN_EXE_prune"));
    command.arg("merge").args(["--quiet", "--base"]).arg(&models[0]);
    let experts = match method.contains("passthrough") {
        true => &models[1..2],
        false => &models[1..],
    };
    for model in experts {
        command.arg("--model").arg(model);
    }
    // These two average all three; model_stock needs a third model.
    if method.contains("linear") && !method.contains("dare") || method.contains("model_stock") {
        command.arg("--model").arg(&models[0]);
    }
    command.args(method.split_whitespace()).arg("--save").arg(out);
    ensure!(command.output()?.status.success(), "prune merge {method} failed");
    let manifest: Manifest = serde_json::from_slice(&fs::read(out.join("run.json"))?)?;
    let phases = manifest.phases.iter();
    let pass = phases.filter(|phase| phase.phase == Phase::Merge);
    let peak = pass.clone().filter_map(|phase| phase.peak_anonymous).max();
    let peak = peak.map_or(f64::NAN, |peak| peak.0 as f64 / f64::from(1 << 20));
    Ok((pass.map(|phase| phase.seconds).sum(), peak))
}

fn main() -> Result<()> {
    let models: Vec<PathBuf> = std::env::args()
        .skip(1)
        // `cargo bench` adds a flag.
        .filter(|argument| !argument.starts_with("--"))
        .map(PathBuf::from)
        .collect();
    if models.is_empty() {
        println!("cargo bench --bench merging -- BASE EXPERT EXPERT");
        return Ok(());
    }
    let variable = |name: &str, default: &str| std::env::var(name).unwrap_or(default.to_string());
    let beside = models[0].with_file_name("merge-bench");
    let out = PathBuf::from(variable("OUT", &beside.display().to_string()));
    let rounds: usize = variable("ROUNDS", "3").parse()?;
    println!("| method | models read | loop, s | merge, s | ratio of each round | peak MiB |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for method in variable("METHODS", METHODS).lines() {
        let read = match method {
            _ if method.contains("passthrough") => &models[1..2],
            _ if method.contains("slerp") => &models[..2],
            _ => &models[..],
        };
        let sources: Result<Vec<Checkpoint>> =
            read.iter().map(|folder| Checkpoint::open(folder)).collect();
        let sources = sources?;
        let models = match method.contains("slerp") {
            true => &models[..2],
            false => &models[..],
        };
        let (mut loops, mut merges, mut ratios, mut most) = (vec![], vec![], vec![], 0.0f64);
        for _ in 0..rounds {
            let of_loop = copy(&sources, &out)?;
            let (of_merge, peak) = merge(models, method, &out)?;
            loops.push(format!("{of_loop:.1}"));
            merges.push(format!("{of_merge:.1}"));
            ratios.push(format!("{:.2}", of_merge / of_loop));
            most = most.max(peak);
        }
        println!(
            "| {method} | {} | {} | {} | {} | {most:.0} |",
            sources.len(),
            loops.join(" "),
            merges.join(" "),
            ratios.join(" ")
        );
    }
    fs::remove_dir_all(&out)?;
    Ok(())
}
