//! The page `prune report` writes: a self-contained HTML file, and its pictures as separate files.
//!
//! The page has no script and loads nothing. It suits light and dark screens of any width, and paper. `page.html` is its template:
//! minijinja escapes everything that comes from a manifest (`escape`).

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Result;
use minijinja::{AutoEscape, Environment};
use serde::Serialize;

use super::comparison::{NamedRun, RunComparison, method_label};
use super::format::{Table, escape, finite};
use super::grid;
use super::merges;
use super::plots::{Figure, heat, memory, perplexity, phases, training};
use super::settings;
use crate::run::Manifest;
use crate::run::grid::GridRecord;

/// A report, not yet written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// `report.html`.
    pub html: String,
    /// File name and content of every picture.
    pub pictures: Vec<(String, String)>,
}

/// The variables of the template.
#[derive(Serialize)]
struct Page<'a> {
    title: String,
    style: &'static str,
    /// Present for several runs.
    comparison: Option<ComparedRuns<'a>>,
    /// Present for a sweep.
    grid: Option<GridSection>,
    runs: Vec<RunSection<'a>>,
    /// The version that draws.
    version: &'static str,
    /// The versions of the runs.
    versions: String,
}

#[derive(Serialize)]
struct ComparedRuns<'a> {
    charts: usize,
    /// Protocols under which dense perplexities differ.
    disagreements: Vec<String>,
    figures: Vec<Figure>,
    /// Runs on no chart, and the reason.
    left_out: Vec<(&'a str, String)>,
    table: Table,
}

/// The part of a page that a sweep has.
#[derive(Serialize)]
struct GridSection {
    lead: Vec<String>,
    warnings: Vec<String>,
    means: Table,
    notes: Vec<String>,
    figures: Vec<Figure>,
    settings: Vec<(String, String)>,
    cells: Table,
}

#[derive(Serialize)]
struct RunSection<'a> {
    name: &'a str,
    /// The target of links to this part.
    anchor: String,
    summary: String,
    warnings: &'a [String],
    figures: Vec<Figure>,
    /// The run has layers but no output errors.
    lacks_errors: bool,
    settings: Vec<(&'static str, String)>,
    /// Tables that are folded, with their titles.
    details: Vec<(&'static str, Table)>,
}

impl Report {
    /// Draws the report of these runs, whose names must differ.
    pub fn of(runs: &[NamedRun]) -> Result<Self> {
        let title = match runs {
            [run] if run.manifest.merge.is_some() => format!("Merge report: {}", run.name),
            [run] => format!("Pruning report: {}", run.name),
            _ => format!("Report: {} runs", runs.len()),
        };
        let prefixes = prefixes(runs);
        let comparison = (runs.len() > 1).then(|| compare(runs)).transpose()?;
        let sections = runs
            .iter()
            .zip(&prefixes)
            .map(|(run, prefix)| section(run, prefix))
            .collect::<Result<Vec<_>>>()?;
        let pictures = |prefix: &str, figures: &[Figure]| -> Vec<(String, String)> {
            let named = |figure: &Figure| format!("{prefix}{}.svg", figure.name);
            let figures = figures.iter();
            figures.map(|figure| (named(figure), figure.svg.clone())).collect()
        };
        let mut all = comparison
            .as_ref()
            .map_or_else(Vec::new, |comparison| pictures("", &comparison.figures));
        for (section, prefix) in sections.iter().zip(&prefixes) {
            all.extend(pictures(prefix, &section.figures));
        }
        let versions: BTreeSet<&str> =
            runs.iter().map(|run| run.manifest.prune_version.as_str()).collect();
        let html = render(&Page {
            title,
            style: include_str!("page.css"),
            comparison,
            grid: None,
            runs: sections,
            version: env!("CARGO_PKG_VERSION"),
            versions: versions.into_iter().collect::<Vec<_>>().join(", "),
        })?;
        Ok(Self { html, pictures: all })
    }
}

/// The page of a sweep; `name` is the name of its folder.
///
/// # Errors
/// Fails where the picture cannot be drawn.
pub fn of_grid(name: &str, record: &GridRecord) -> Result<String> {
    let settings = record.settings.iter();
    let section = GridSection {
        lead: grid::lead(record),
        warnings: record.warnings.clone(),
        means: grid::means(record),
        notes: grid::notes(record),
        figures: perplexity::of_grid(record)?.into_iter().collect(),
        settings: settings.map(|(name, value)| (name.replace('_', "-"), value.clone())).collect(),
        cells: grid::every_cell(record),
    };
    render(&Page {
        title: format!("Sweep report: {name}"),
        style: include_str!("page.css"),
        comparison: None,
        grid: Some(section),
        runs: Vec::new(),
        version: env!("CARGO_PKG_VERSION"),
        versions: record.prune_version.clone(),
    })
}

/// Fills the template. Every text is escaped except the style sheet and the pictures, which the template marks as safe.
fn render(page: &Page<'_>) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_keep_trailing_newline(true);
    // Makes the result of a macro safe.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) if !value.is_safe() => out.write_str(&escape(text)).map_err(Into::into),
        _ => write!(out, "{value}").map_err(Into::into),
    });
    Ok(environment.render_str(include_str!("page.html"), page)?)
}

fn compare(runs: &[NamedRun]) -> Result<ComparedRuns<'_>> {
    let comparison = RunComparison::of(runs);
    let mut figures = Vec::new();
    for (index, group) in comparison.groups.iter().enumerate() {
        if let Some(mut figure) = perplexity::figure(group)? {
            if comparison.groups.len() > 1 {
                figure.name += &format!("-{}", index + 1);
            }
            figures.push(figure);
        }
    }
    let groups = comparison.groups.iter();
    Ok(ComparedRuns {
        charts: comparison.groups.len(),
        disagreements: groups
            .filter(|group| group.dense.len() > 1)
            .map(|group| group.protocol.description.clone())
            .collect(),
        figures,
        left_out: comparison.left_out,
        table: settings::side_by_side(runs),
    })
}

fn section<'a>(run: &'a NamedRun, prefix: &str) -> Result<RunSection<'a>> {
    let manifest = &run.manifest;
    let drawn = [
        heat::sparsity(manifest)?,
        heat::output_error(manifest)?,
        training::losses(manifest)?,
        training::rates(manifest)?,
        phases::figure(manifest)?,
        memory::figure(manifest)?,
    ];
    let has_errors = drawn[1].is_some();
    let details = [
        ("Every layer in numbers", merges::every_layer(manifest)),
        ("Every matrix in numbers", settings::every_matrix(manifest)),
        ("Every tensor in numbers", merges::every_tensor(manifest)),
        ("Memory samples in numbers", settings::every_memory_sample(manifest)),
    ];
    Ok(RunSection {
        name: &run.name,
        anchor: format!("run-{}", prefix.trim_end_matches('-')),
        summary: summary(manifest),
        warnings: &manifest.warnings,
        figures: drawn.into_iter().flatten().collect(),
        lacks_errors: !manifest.layers.is_empty() && !has_errors && manifest.recovery.is_none(),
        settings: settings::settings(manifest),
        details: details.into_iter().filter(|(_, table)| !table.rows.is_empty()).collect(),
    })
}

/// A run in one or two sentences.
fn summary(manifest: &Manifest) -> String {
    let model = format!(
        "{} ({:.1} M parameters)",
        manifest.model.path,
        manifest.model.parameters as f64 / 1e6
    );
    let mut text = match (&manifest.merge, manifest.sparsity) {
        (Some(merge), _) => return merges::summary(merge, &model),
        (None, Some(sparsity)) => format!(
            "{} on {model}: {:.2}\u{a0}% of the weights in its decoder layers are zero.",
            method_label(manifest),
            sparsity.ratio * 100.0
        ),
        (None, None) => format!("An evaluation of {model}; nothing was pruned."),
    };
    let [first, second] = manifest.perplexity_names();
    let measured: Vec<String> =
        [(first, manifest.perplexity.dense), (second, manifest.perplexity.pruned)]
            .into_iter()
            .filter_map(|(name, report)| {
                let side = name.replace("perplexity", "");
                let text = format!("{} {}", finite(report?.perplexity), side.trim());
                Some(text.trim_end().to_string())
            })
            .collect();
    if !measured.is_empty() {
        let _ = write!(text, " Perplexity: {}.", measured.join(", "));
    }
    text
}

/// The prefix of the names of each run's pictures: empty for a single run.
fn prefixes(runs: &[NamedRun]) -> Vec<String> {
    let mut used = BTreeSet::new();
    match runs {
        [_] => vec![String::new()],
        _ => {
            runs.iter().map(|run| unused(format!("{}-", file_name(&run.name)), &mut used)).collect()
        }
    }
}

/// A run's name as the beginning of a file name: letters, digits, dots and dashes.
fn file_name(name: &str) -> String {
    let plain: String = name
        .chars()
        .map(|character| match character {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' | '-' => character,
            _ => '-',
        })
        .collect();
    let plain = plain.trim_matches(['-', '.']);
    if plain.is_empty() { "run" } else { plain }.to_string()
}

/// Returns `name`, or `name` with the first number that makes it new.
fn unused(name: String, used: &mut BTreeSet<String>) -> String {
    let candidates =
        std::iter::once(name.clone()).chain((2..).map(|number| format!("{name}{number}-")));
    for candidate in candidates {
        // Some file systems ignore case.
        if used.insert(candidate.to_lowercase()) {
            return candidate;
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;

    fn run(name: &str, method: &str, ratio: f64) -> NamedRun {
        let mut manifest = made_up::manifest(method, ratio);
        made_up::evaluated(&mut manifest, 10.0, 10.0 + 20.0 * ratio);
        NamedRun { name: name.into(), manifest }
    }

    fn names(report: &Report) -> Vec<&str> {
        report.pictures.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn one_run_has_its_pictures_and_no_comparison() {
        let report = Report::of(&[run("a", "wanda", 0.5)]).unwrap();
        assert_eq!(names(&report), ["sparsity.svg", "phases.svg", "memory.svg"]);
        assert!(!report.html.contains("Comparison"));
        assert!(report.html.contains("No output errors"));
        assert_eq!(report.html.matches("<figure>").count(), 3);
    }

    #[test]
    fn several_runs_are_compared_and_their_files_have_names_of_their_own() {
        let report =
            Report::of(&[run("x/a b", "wanda", 0.5), run("x-a-b", "magnitude", 0.5)]).unwrap();
        assert_eq!(
            names(&report),
            [
                "perplexity.svg",
                "x-a-b-sparsity.svg",
                "x-a-b-phases.svg",
                "x-a-b-memory.svg",
                "x-a-b-2-sparsity.svg",
                "x-a-b-2-phases.svg",
                "x-a-b-2-memory.svg"
            ]
        );
        assert!(report.html.contains("<h2>Comparison</h2>"));
        assert!(!report.html.contains("not all measured in the same way"));
    }

    #[test]
    fn runs_measured_differently_are_on_charts_of_their_own() {
        let mut other = run("b", "wanda", 0.6);
        other.manifest.evaluation.as_mut().unwrap().text_sha256 = "0000".into();
        let report = Report::of(&[run("a", "wanda", 0.5), other]).unwrap();
        assert!(report.html.contains("they are on 2 charts"));
        assert_eq!(names(&report)[..2], ["perplexity-1.svg", "perplexity-2.svg"]);
    }

    #[test]
    fn names_from_a_manifest_cannot_become_markup() {
        let mut run = run("<script>alert(1)</script>", "wanda", 0.5);
        let manifest = &mut run.manifest;
        let evil = "\"><img src=x onerror=alert(1)>";
        manifest.model.path = evil.into();
        manifest.prune_version = evil.into();
        manifest.warnings = vec![evil.into()];
        manifest.arguments = vec![evil.into()];
        manifest.layers[0].matrices[0].name = format!("model.layers.0.{evil}");
        manifest.evaluation.as_mut().unwrap().dataset = evil.into();
        manifest.pruning.as_mut().unwrap().method = evil.into();
        let mut second = run.clone();
        second.name = "b".into();
        let report = Report::of(&[run, second]).unwrap();
        assert!(!report.html.contains("<img") && !report.html.contains("<script"));
        for (name, svg) in &report.pictures {
            assert!(!svg.contains("<img"), "{name}");
            assert!(!name.contains(['<', '/', '>']), "{name}");
        }
    }

    #[test]
    fn control_characters_from_a_manifest_reach_neither_page_nor_pictures() {
        let mut run = run("a\u{1b}[2J", "wanda\u{7}", 0.5);
        let manifest = &mut run.manifest;
        manifest.layers[0].matrices[0].name = "model.layers.0.\u{1b}]0;x\u{7}\u{202e}".into();
        let second = NamedRun { name: "b".into(), ..run.clone() };
        let report = Report::of(&[run, second]).unwrap();
        let is_control = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!report.html.contains(is_control));
        assert!(report.html.contains("\\u{1b}]0;x\\u{7}\\u{202e}"));
        for (name, svg) in &report.pictures {
            assert!(!svg.contains(is_control), "{name}");
        }
    }
}
