//! The page `prune report` writes: a self-contained HTML file, and its pictures as separate files.
//!
//! The page has no script and loads nothing. It suits light and dark screens of any width, and paper. `page.html` is its template:
//! minijinja escapes everything that comes from a manifest (`escape`).

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Result;
use minijinja::{AutoEscape, Environment, Value, context};

use super::comparison::{NamedRun, RunComparison, method_label};
use super::costs::ComparableCosts;
use super::format::{Table, escape, finite, millions};
use super::grid;
use super::merges;
use super::plots::{Figure, costs, heat, memory, metrics, phases, training};
use super::settings;
use crate::run::Manifest;
use crate::run::grid::GridRecord;
use crate::run::metric::Metric;

/// A report, not yet written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// `report.html`.
    pub html: String,
    /// File name and content of every picture.
    pub pictures: Vec<(String, String)>,
}

impl Report {
    /// Draws the report of these runs, whose names must differ.
    pub fn of(runs: &[NamedRun]) -> Result<Self> {
        let title = match runs {
            [run] => format!("{} report: {}", kind(&run.manifest), run.name),
            _ => format!("Report: {} runs", runs.len()),
        };
        let mut pictures = Vec::new();
        let mut keep = |prefix: &str, figures: &[Figure]| {
            let named =
                |figure: &Figure| (format!("{prefix}{}.svg", figure.name), figure.svg.clone());
            pictures.extend(figures.iter().map(named));
        };
        let comparison = (runs.len() > 1).then(|| {
            let comparison = RunComparison::of(runs, &Metric::Perplexity);
            let figures = Metric::DRAWN.iter().map(|metric| charts(metric, runs));
            let figures = figures.collect::<Vec<_>>().concat();
            keep("", &figures);
            compared(comparison, figures, settings::side_by_side(runs))
        });
        let sections = runs.iter().zip(prefixes(runs)).map(|(run, prefix)| {
            let figures = figures(&run.manifest);
            keep(&prefix, &figures);
            section(run, &prefix, figures)
        });
        let sections: Vec<Value> = sections.collect();
        let versions: BTreeSet<&str> =
            runs.iter().map(|run| run.manifest.prune_version.as_str()).collect();
        let versions = versions.into_iter().collect::<Vec<_>>().join(", ");
        let html = render(title, versions, context! { comparison, runs => sections })?;
        Ok(Self { html, pictures })
    }
}

/// The first word of the page of a single run.
fn kind(manifest: &Manifest) -> &'static str {
    if manifest.merge.is_some() {
        "Merge"
    } else if manifest.recovery.is_some() {
        "Recovery"
    } else if manifest.pruning.is_some() {
        "Pruning"
    } else {
        "Evaluation"
    }
}

/// The page of a sweep; `name` is the name of its folder.
pub fn of_grid(name: &str, record: &GridRecord) -> Result<String> {
    let settings = record.settings.iter();
    let settings = settings.map(|(name, value)| (name.replace('_', "-"), value));
    let grid = context! {
        lead => grid::lead(record),
        warnings => record.warnings,
        tables => grid::tables(record),
        notes => grid::notes(record),
        figures => grid_figures(record),
        settings => settings.collect::<Vec<_>>(),
        cells => grid::every_cell(record),
    };
    render(format!("Sweep report: {name}"), record.prune_version.clone(), context! { grid })
}

/// Fills the template for runs of these versions. Every text is escaped except the style sheet and the pictures, which the template
/// marks as safe.
fn render(title: String, versions: String, body: Value) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_keep_trailing_newline(true);
    // Makes the result of a macro safe.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) if !value.is_safe() => out.write_str(&escape(text)).map_err(Into::into),
        _ => write!(out, "{value}").map_err(Into::into),
    });
    let (style, version) = (include_str!("page.css"), env!("CARGO_PKG_VERSION"));
    let page = context! { title, style, version, versions, ..body };
    Ok(environment.render_str(include_str!("page.html"), page)?)
}

/// The pictures of a sweep: a chart per metric of its table.
fn grid_figures(record: &GridRecord) -> Vec<Figure> {
    record.metrics.iter().filter_map(|metric| metrics::of_grid(metric, record)).collect()
}

/// The charts of a metric over sparsity, bytes and speed. Charts of several groups are numbered.
fn charts(metric: &Metric, runs: &[NamedRun]) -> Vec<Figure> {
    let comparable = RunComparison::of(runs, metric).groups;
    let over_sparsity = comparable.iter().map(|group| vec![metrics::figure(metric, group)]);
    let costs = ComparableCosts::of(runs, metric);
    let over_costs =
        costs.iter().map(|group| vec![costs::bytes(metric, group), costs::speed(metric, group)]);
    let numbered = |groups: Vec<Vec<Option<Figure>>>| -> Vec<Figure> {
        let is_numbered = groups.len() > 1;
        let figures = (1..).zip(groups).flat_map(|(number, drawn)| {
            drawn.into_iter().flatten().map(move |mut figure| {
                if is_numbered {
                    figure.name += &format!("-{number}");
                }
                figure
            })
        });
        figures.collect()
    };
    [numbered(over_sparsity.collect()), numbered(over_costs.collect())].concat()
}

/// The part of the page that compares its runs.
fn compared(comparison: RunComparison<'_>, figures: Vec<Figure>, table: Table) -> Value {
    // Protocols under which dense perplexities differ.
    let disagreements = comparison.groups.iter().filter(|group| group.dense.len() > 1);
    let disagreements: Vec<&str> = disagreements.map(|group| group.description.as_str()).collect();
    let (charts, left_out) = (comparison.groups.len(), &comparison.left_out);
    context! { charts, disagreements, figures, left_out, table }
}

/// The pictures of a run.
fn figures(manifest: &Manifest) -> Vec<Figure> {
    let drawn = [
        heat::sparsity(manifest),
        heat::output_error(manifest),
        training::losses(manifest),
        training::rates(manifest),
        phases::figure(manifest),
        memory::figure(manifest),
    ];
    drawn.into_iter().flatten().collect()
}

/// The part of the page for a run.
fn section(run: &NamedRun, prefix: &str, figures: Vec<Figure>) -> Value {
    let manifest = &run.manifest;
    let has_errors = figures.iter().any(|figure| figure.name == "output-error");
    // Tables that are folded, with their titles.
    let details = [
        ("Every layer in numbers", merges::every_layer(manifest)),
        ("Every matrix in numbers", settings::every_matrix(manifest)),
        ("Every tensor in numbers", merges::every_tensor(manifest)),
        ("Memory samples in numbers", settings::every_memory_sample(manifest)),
    ];
    let details = details.into_iter().filter(|(_, table)| !table.rows.is_empty());
    context! {
        name => run.name,
        anchor => format!("run-{}", prefix.trim_end_matches('-')),
        summary => summary(manifest),
        warnings => manifest.warnings,
        figures,
        lacks_errors => !manifest.layers.is_empty() && !has_errors && manifest.recovery.is_none(),
        settings => settings::settings(manifest),
        details => details.collect::<Vec<_>>(),
    }
}

/// A run in one or two sentences.
fn summary(manifest: &Manifest) -> String {
    let parameters = millions(manifest.model.parameters);
    let model = format!("{} ({parameters} parameters)", manifest.model.path);
    let mut text = match (&manifest.merge, manifest.sparsity) {
        (Some(merge), _) => return merges::summary(merge, &model),
        (None, Some(sparsity)) => format!(
            "{} on {model}: {:.2}\u{a0}% of the weights in its decoder layers are zero.",
            method_label(manifest),
            sparsity.ratio * 100.0
        ),
        (None, None) => format!("An evaluation of {model}; nothing was pruned."),
    };
    let measured: Vec<String> = manifest
        .perplexities()
        .map(|(name, report)| {
            let side = name.replace("perplexity", "");
            format!("{} {}", finite(report.perplexity), side.trim()).trim_end().to_string()
        })
        .collect();
    if !measured.is_empty() {
        let _ = write!(text, " Perplexity: {}.", measured.join(", "));
    }
    text
}

/// The prefix of the names of each run's pictures: empty for a single run.
fn prefixes(runs: &[NamedRun]) -> Vec<String> {
    if let [_] = runs {
        return vec![String::new()];
    }
    let mut used = BTreeSet::new();
    runs.iter().map(|run| unused(format!("{}-", file_name(&run.name)), &mut used)).collect()
}

/// A run's name as the beginning of a file name: letters, digits, dots and dashes.
fn file_name(name: &str) -> String {
    let is_other = |c: char| !(c.is_ascii_alphanumeric() || "._-".contains(c));
    let plain = name.replace(is_other, "-");
    let plain = plain.trim_matches(['-', '.']);
    if plain.is_empty() { "run" } else { plain }.to_string()
}

/// Returns `name`, or `name` with the first number that makes it new.
fn unused(name: String, used: &mut BTreeSet<String>) -> String {
    let numbered = (2..).map(|number| format!("{name}{number}-"));
    let mut candidates = std::iter::once(name.clone()).chain(numbered);
    // Some file systems ignore case.
    candidates.find(|name| used.insert(name.to_lowercase())).unwrap_or(name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::made_up;

    fn run(name: &str, method: &str, ratio: f64) -> NamedRun {
        let mut manifest = made_up::manifest(method, ratio);
        made_up::evaluated(&mut manifest, 10.0, 10.0 + 20.0 * ratio);
        NamedRun { name: name.into(), manifest, speed: None }
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
    fn the_title_of_a_run_says_what_the_run_did() {
        let titled = |run: NamedRun, title: &str| {
            let html = Report::of(&[run]).unwrap().html;
            assert!(html.contains(&format!("<h1>{title}</h1>")), "no `{title}`");
        };
        titled(run("a", "wanda", 0.5), "Pruning report: a");
        let mut recovered = run("b", "wanda", 0.5);
        made_up::recovered(&mut recovered.manifest);
        titled(recovered, "Recovery report: b");
        let mut evaluation = run("c", "wanda", 0.5);
        evaluation.manifest.pruning = None;
        titled(evaluation, "Evaluation report: c");
    }

    #[test]
    fn names_of_phases_keep_their_indent() {
        let html = Report::of(&[run("a", "wanda", 0.5)]).unwrap().html;
        assert!(html.contains("<th scope=\"row\">  calibrate</th>"), "{html}");
        let rule = html.lines().find(|line| line.starts_with(".facts th {")).unwrap();
        assert!(rule.contains("white-space: pre-wrap"), "{rule}");
    }

    #[test]
    fn several_runs_are_compared_and_their_files_have_names_of_their_own() {
        let report =
            Report::of(&[run("x/a b", "wanda", 0.5), run("x-a-b", "magnitude", 0.5)]).unwrap();
        assert_eq!(
            names(&report),
            [
                "perplexity.svg",
                "perplexity-bytes.svg",
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
