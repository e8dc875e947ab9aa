//! `prune report`: pictures and a page from the run folders of finished runs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};

use super::args::MessageArgs;
use super::console::Console;
use crate::bytes::LARGEST_RECORD;
use crate::checkpoint::{CONFIG_FILE, write_atomic};
use crate::failure::Failure;
use crate::input::{self, Expected};
use crate::job::folder::MANIFEST;
use crate::quantized::config::KEY;
use crate::report::comparison::NamedRun;
use crate::report::page::Report;
use crate::run::command_line::quoted;
use crate::run::grid::GRID_FILE;
use crate::run::manifest::SCHEMA;
use crate::run::{Events, GenerationReport, Manifest};

/// The page's name in the report's folder.
const PAGE: &str = "report.html";

/// The object of `prune generate --bench --json`, which a user puts into the run's folder.
const SPEED: &str = "speed.json";

/// Run folders that a message names, at most.
const RUNS_NAMED: usize = 3;

const EXAMPLES: &str = "\
Examples:
  prune report out/llama2-7b
  prune report out/wanda-* out/magnitude-* --out comparison";

/// Flags of `prune report`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub struct ReportArgs {
    /// Run folders (what --save named), or their run.json
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Folder for report.html and its pictures [default: RUN/report for one run, ./report for several]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Writes the report and prints the names of its files.
///
/// # Errors
/// Fails if a folder is not a finished run of this or an older version, and if the files cannot be written.
pub fn command(args: &ReportArgs, console: &Console) -> Result<()> {
    let runs = load(&args.runs, console)?;
    let out = match (&args.out, runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.folder.join("report"),
        (None, _) => PathBuf::from("report"),
    };
    if let Some(file) = out.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir()) {
        return Err(Failure::usage(format!(
            "`{}` is a file; a report goes into a folder",
            file.display()
        ))
        .hint("choose another --out folder")
        .into());
    }
    let named: Vec<NamedRun> = names(&runs)
        .into_iter()
        .zip(runs)
        .map(|(name, run)| NamedRun { name, manifest: run.manifest, speed: run.speed })
        .collect();
    let report = Report::of(&named)?;
    std::fs::create_dir_all(&out)
        .with_context(|| format!("creating the folder `{}`", out.display()))?;
    let mut files = Vec::new();
    let pictures = report.pictures.iter().map(|(name, svg)| (&**name, svg));
    // The page last: where it is, its pictures are.
    for (name, content) in pictures.chain([(PAGE, &report.html)]) {
        let path = out.join(name);
        write_atomic(&path, content.as_bytes())?;
        files.push(path.display().to_string());
    }
    let lines: String = files.iter().map(|file| format!("{file}\n")).collect();
    console.record(&json!({ "files": files }), &lines)
}

/// A run and where it was found.
struct Found {
    folder: PathBuf,
    manifest: Manifest,
    speed: Option<GenerationReport>,
}

/// Reads every run once, whatever it is called.
fn load(paths: &[PathBuf], console: &Console) -> Result<Vec<Found>> {
    let (mut runs, mut seen) = (Vec::new(), Vec::new());
    for path in paths {
        let (folder, file) = locate(path)?;
        let identity = file.canonicalize().unwrap_or_else(|_| file.clone());
        if seen.contains(&identity) {
            console.note(format!("`{}` was named before", path.display()));
            continue;
        }
        seen.push(identity);
        let manifest = read(&file)?;
        // The page of a single run has no chart of speeds.
        let speed = if paths.len() > 1 { speed(&folder)? } else { None };
        runs.push(Found { folder, manifest, speed });
    }
    Ok(runs)
}

/// The run folder and its manifest, which must be there.
fn locate(path: &Path) -> Result<(PathBuf, PathBuf)> {
    let shown = path.display();
    // A bare name lies in the current folder.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let refused = |why: String| Failure::usage(why).hint("name the folder that --save named");
    if path.is_file() {
        if path.extension().is_none_or(|extension| extension != "json") {
            return Err(refused(format!("`{shown}` is not a run folder nor a run.json")).into());
        }
        return Ok((folder.to_path_buf(), path.to_path_buf()));
    }
    if !path.exists() {
        return Err(refused(format!("there is no run folder `{shown}`")).into());
    }
    let manifest = path.join(MANIFEST);
    // A folder of that name is refused when it is read.
    if manifest.exists() {
        return Ok((path.to_path_buf(), manifest));
    }
    let below = runs_in(path);
    let failure = if path.join(CONFIG_FILE).is_file() {
        let failure = refused(format!("`{shown}` is a model, not a run folder"));
        if folder.join(MANIFEST).is_file() {
            failure.hint(format!("its run is `{}`", folder.display()))
        } else if is_quantized(path) {
            failure
                .detail("`prune quantize` and `prune pack` write a model and leave no run")
                .hint(format!("measure it: prune eval {}", typed(&[path.to_path_buf()])))
        } else {
            failure
        }
    } else if path.join(GRID_FILE).is_file() {
        refused(format!("`{shown}` is the folder of a sweep, not a run folder"))
            .hint(format!("name its cells, or make its page again: prune sweep --table {shown}"))
    } else if !below.is_empty() {
        let more = if below.len() > RUNS_NAMED { " …" } else { "" };
        let named = typed(&below[..below.len().min(RUNS_NAMED)]);
        refused(format!("`{shown}` is not a run folder, it holds run folders"))
            .hint(format!("name them: prune report {named}{more}"))
    } else if is_begun(path) {
        Failure::new(format!("the run in `{shown}` is not finished"))
            .detail(format!("it has no {MANIFEST}, which is written last"))
            .hint("wait for it, or give its command again")
    } else {
        refused(format!("`{shown}` is not a run folder: it has no {MANIFEST}"))
    };
    Err(failure.into())
}

/// The run folders in a folder, in order.
fn runs_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut runs: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| path.join(MANIFEST).is_file()).collect();
    runs.sort();
    runs
}

/// Paths as a shell takes them.
fn typed(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    quoted(&paths)
}

/// Returns true for a model whose matrices are packed or have 4 bits.
fn is_quantized(model: &Path) -> bool {
    let bytes = input::read(&model.join(CONFIG_FILE), LARGEST_RECORD, Expected::Json);
    let config = bytes.ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    config.is_some_and(|config| config.get(KEY).is_some_and(|value| !value.is_null()))
}

/// Returns true where an unfinished run has left files.
fn is_begun(folder: &Path) -> bool {
    folder.join("model").is_dir()
        || std::fs::read_dir(folder).is_ok_and(|mut entries| {
            entries.any(|entry| {
                entry.is_ok_and(|entry| entry.file_name().to_string_lossy().ends_with(".partial"))
            })
        })
}

fn read(file: &Path) -> Result<Manifest> {
    let shown = file.display();
    let no_manifest = |why: String| {
        Failure::new(format!("`{shown}` is not the record of a run"))
            .detail(why)
            .hint("name a folder that `prune --save` or `prune eval --save` wrote")
    };
    let bytes = input::read(file, LARGEST_RECORD, Expected::Json)
        .map_err(|error| input::with_remedy(no_manifest(error.to_string()), &error))?;
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|error| no_manifest(error.to_string()))?;
    let schema = value.get("schema").and_then(Value::as_u64);
    if let Some(schema) = schema.filter(|&schema| schema > u64::from(SCHEMA)) {
        let version = value.get("prune_version").and_then(Value::as_str);
        return Err(Failure::new(format!("`{shown}` was written by a newer prune"))
            .detail(format!("its schema is {schema}, this program reads up to {SCHEMA}"))
            .hint(format!("use prune {} or newer", version.unwrap_or("of its version")))
            .into());
    }
    Ok(serde_json::from_value(value).map_err(|error| no_manifest(error.to_string()))?)
}

/// Reads the measured speed of a run; `None` without the file.
///
/// # Errors
/// Fails for a file that is not the object of `prune generate --json`, and for a speed that is no positive number.
fn speed(folder: &Path) -> Result<Option<GenerationReport>> {
    let file = folder.join(SPEED);
    if !file.exists() {
        return Ok(None);
    }
    let (shown, model) = (file.display(), folder.join("model"));
    let broken = |why: String| {
        let again = typed(std::slice::from_ref(&model));
        let into = typed(std::slice::from_ref(&file));
        Failure::new(format!("`{shown}` has no speed of decoding")).detail(why).hint(format!(
            "make it again: prune generate {again} --prompt \"Once upon a time\" --bench --json > {into}, or remove it"
        ))
    };
    let bytes = input::read(&file, LARGEST_RECORD, Expected::Json)
        .map_err(|error| input::with_remedy(broken(error.to_string()), &error))?;
    let report: GenerationReport =
        serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    match report.tokens_per_second {
        Some(rate) if rate > 0.0 => Ok(Some(report)),
        _ => Err(broken("`tokens_per_second` is not a positive number".to_string()).into()),
    }
}

/// The last part of each folder's name; as many parts more as make all of them differ.
fn names(runs: &[Found]) -> Vec<String> {
    let parts: Vec<Vec<String>> = runs
        .iter()
        .map(|run| {
            let folder = run.folder.canonicalize();
            let folder = folder.as_deref().unwrap_or(&run.folder);
            folder
                .iter()
                .map(|part| part.to_string_lossy().into_owned())
                .filter(|part| part != "/")
                .collect()
        })
        .collect();
    let longest = parts.iter().map(Vec::len).max().unwrap_or(1);
    let tails = |count: usize| -> Vec<String> {
        parts.iter().map(|parts| parts[parts.len().saturating_sub(count)..].join("/")).collect()
    };
    (1..=longest)
        .map(tails)
        .find(|names| names.iter().collect::<BTreeSet<_>>().len() == names.len())
        // Files in the same folder are told apart by number.
        .unwrap_or_else(|| {
            tails(1)
                .into_iter()
                .enumerate()
                .map(|(index, name)| format!("{name} {}", index + 1))
                .collect()
        })
}
