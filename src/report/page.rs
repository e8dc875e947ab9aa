//! The page `prune report` writes: one HTML file that needs nothing else, and its pictures as files of their own.
//!
//! No script, no request to anywhere, light and dark, for screens of any width and for paper. Everything that comes from a
//! manifest is escaped.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Result;

use super::comparison::{Comparison, NamedRun, method_label};
use super::html::escape;
use super::plots::{Figure, heat, memory, perplexity, phases};
use super::settings;
use crate::run::Manifest;

const STYLE: &str = include_str!("page.css");

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
    ///
    /// # Errors
    /// When a picture cannot be drawn.
    pub fn of(runs: &[NamedRun]) -> Result<Self> {
        let mut page = Page::default();
        let title = match runs {
            [run] => format!("Pruning report: {}", run.name),
            _ => format!("Pruning report: {} runs", runs.len()),
        };
        let prefixes = prefixes(runs);
        page.line(&format!("<h1>{}</h1>", escape(&title)));
        if runs.len() > 1 {
            let links: Vec<String> = runs
                .iter()
                .zip(&prefixes)
                .map(|(run, prefix)| {
                    format!("<a href=\"#{}\">{}</a>", anchor(prefix), escape(&run.name))
                })
                .collect();
            page.line(&format!("<nav>{}</nav>", links.join(" · ")));
            page.comparison(runs)?;
        }
        for (run, prefix) in runs.iter().zip(prefixes) {
            if runs.len() > 1 {
                let anchor = anchor(&prefix);
                page.line(&format!("<h2 id=\"{anchor}\">{}</h2>", escape(&run.name)));
            }
            page.run(run, &prefix)?;
        }
        let versions: BTreeSet<&str> = runs
            .iter()
            .map(|run| run.manifest.prune_version.as_str())
            .collect();
        let versions: Vec<&str> = versions.into_iter().collect();
        page.line(&format!(
            "<footer>Drawn from run.json by prune {}; the runs were made by prune {}.</footer>",
            env!("CARGO_PKG_VERSION"),
            escape(&versions.join(", "))
        ));
        let html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
            escape(&title),
            page.body
        );
        Ok(Self {
            html,
            pictures: page.pictures,
        })
    }
}

#[derive(Default)]
struct Page {
    body: String,
    pictures: Vec<(String, String)>,
}

impl Page {
    fn line(&mut self, html: &str) {
        self.body += html;
        self.body.push('\n');
    }

    fn comparison(&mut self, runs: &[NamedRun]) -> Result<()> {
        let comparison = Comparison::of(runs);
        self.line("<h2>Comparison</h2>");
        if comparison.groups.len() > 1 {
            self.line(&format!(
                "<p>These runs were not all measured in the same way, so they stand on {} charts: perplexities are comparable only \
                 for the same model layout, evaluation text, tokenizer, windows and window length.</p>",
                comparison.groups.len()
            ));
        }
        for group in comparison
            .groups
            .iter()
            .filter(|group| group.dense.len() > 1)
        {
            self.line(&format!(
                "<p class=\"warning\">Runs measured on {} disagree about the dense model's perplexity: their weights or their \
                 arithmetic differ, so lines there are comparable with care.</p>",
                escape(&group.protocol.describe())
            ));
        }
        let mut figures = Vec::new();
        for (index, group) in comparison.groups.iter().enumerate() {
            if let Some(mut figure) = perplexity::figure(group)? {
                if comparison.groups.len() > 1 {
                    figure.name += &format!("-{}", index + 1);
                }
                figures.push(figure);
            }
        }
        self.figures("", figures);
        for (run, why) in &comparison.left_out {
            self.line(&format!(
                "<p>{} is on no chart: {}.</p>",
                escape(run),
                escape(why)
            ));
        }
        self.line(&settings::side_by_side(runs));
        Ok(())
    }

    fn run(&mut self, run: &NamedRun, prefix: &str) -> Result<()> {
        let manifest = &run.manifest;
        self.line(&format!("<p>{}</p>", escape(&summary(manifest))));
        for warning in &manifest.warnings {
            self.line(&format!(
                "<p class=\"warning\">Warning of the run: {}</p>",
                escape(warning)
            ));
        }
        let drawn = [
            heat::sparsity(manifest)?,
            heat::output_error(manifest)?,
            phases::figure(manifest)?,
            memory::figure(manifest)?,
        ];
        let has_errors = drawn[1].is_some();
        self.figures(prefix, drawn.into_iter().flatten().collect());
        if !manifest.layers.is_empty() && !has_errors {
            self.line(
                "<p>No output errors: they are measured on calibration samples, and this run had none, or was made before they \
                 were measured.</p>",
            );
        }
        self.line("<h3>Settings and protocol</h3>");
        self.line(&settings::settings(manifest));
        self.details("Every matrix in numbers", settings::every_matrix(manifest));
        self.details(
            "Memory samples in numbers",
            settings::every_memory_sample(manifest),
        );
        Ok(())
    }

    fn figures(&mut self, prefix: &str, figures: Vec<Figure>) {
        if figures.is_empty() {
            return;
        }
        self.line("<div class=\"figures\">");
        for figure in figures {
            let Figure { name, caption, svg } = figure;
            self.line(&format!(
                "<figure>\n{svg}<figcaption>{}</figcaption>\n</figure>",
                escape(&caption)
            ));
            self.pictures.push((format!("{prefix}{name}.svg"), svg));
        }
        self.line("</div>");
    }

    fn details(&mut self, title: &str, table: Option<String>) {
        if let Some(table) = table {
            self.line(&format!(
                "<details><summary>{}</summary>\n{table}</details>",
                escape(title)
            ));
        }
    }
}

/// A run in one or two sentences.
fn summary(manifest: &Manifest) -> String {
    let model = format!(
        "{} ({:.1} M parameters)",
        manifest.model.path,
        manifest.model.parameters as f64 / 1e6
    );
    let mut text = match manifest.sparsity {
        Some(sparsity) => format!(
            "{} on {model}: {:.2}\u{a0}% of the weights in its decoder layers are zero.",
            method_label(manifest),
            sparsity.ratio * 100.0
        ),
        None => format!("An evaluation of {model}; nothing was pruned."),
    };
    let value = |perplexity: f64| {
        if perplexity.is_finite() {
            format!("{perplexity:.4}")
        } else {
            "not finite".into()
        }
    };
    let measured: Vec<String> = [
        ("dense", manifest.perplexity.dense),
        ("pruned", manifest.perplexity.pruned),
    ]
    .into_iter()
    .filter_map(|(side, report)| Some(format!("{} {side}", value(report?.perplexity))))
    .collect();
    if !measured.is_empty() {
        let _ = write!(text, " Perplexity: {}.", measured.join(", "));
    }
    text
}

/// What the names of each run's pictures begin with: nothing where there is one run.
fn prefixes(runs: &[NamedRun]) -> Vec<String> {
    let mut used = BTreeSet::new();
    match runs {
        [_] => vec![String::new()],
        _ => runs
            .iter()
            .map(|run| unused(format!("{}-", file_name(&run.name)), &mut used))
            .collect(),
    }
}

/// Where a run begins on the page, for links.
fn anchor(prefix: &str) -> String {
    format!("run-{}", prefix.trim_end_matches('-'))
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

/// `name`, or with the first number that makes it new.
fn unused(name: String, used: &mut BTreeSet<String>) -> String {
    let candidates =
        std::iter::once(name.clone()).chain((2..).map(|number| format!("{name}{number}-")));
    for candidate in candidates {
        // Some file systems do not tell capitals from small letters.
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
        NamedRun {
            name: name.into(),
            manifest,
        }
    }

    fn names(report: &Report) -> Vec<&str> {
        report
            .pictures
            .iter()
            .map(|(name, _)| name.as_str())
            .collect()
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
    fn runs_measured_differently_are_separated_aloud() {
        let mut other = run("b", "wanda", 0.6);
        other.manifest.evaluation.as_mut().unwrap()["text_sha256"] = "0000".into();
        let report = Report::of(&[run("a", "wanda", 0.5), other]).unwrap();
        assert!(report.html.contains("they stand on 2 charts"));
        assert_eq!(
            names(&report)[..2],
            ["perplexity-1.svg", "perplexity-2.svg"]
        );
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
        manifest.phases[0].phase = evil.into();
        manifest.layers[0].matrices[0].name = format!("model.layers.0.{evil}");
        manifest.evaluation.as_mut().unwrap()["dataset"] = evil.into();
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
}
