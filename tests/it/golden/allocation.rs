//! OWL's ratios, against the reference's, and those of `--allocate error` against OWL's.

use std::path::Path;

use anyhow::{Context, Result};
use prune::job;
use prune::pipeline::allocation::Allocation;
use prune::pruning::Pattern;
use prune::run::{Manifest, Silent};
use serde::Deserialize;

use super::reference::Golden;
use super::show;
use crate::support::{self, sparsity};

/// Ratios are equal to this. The percentages they follow from count weights above a threshold.
const EQUAL: f64 = 1e-6;
/// Perplexity, relative.
const PERPLEXITY: f64 = 1e-3;

#[derive(Deserialize)]
struct Ratios {
    layer_sparsity: Vec<f64>,
}

/// A run of a method with the settings of OWL's golden, and the golden.
fn run(
    (name, method): (&str, &str),
    allocate: Allocation,
    shared: &Path,
    cache: &Path,
) -> Result<(Manifest, Golden, Ratios)> {
    let json = shared.join(format!("goldens/methods/owl/{name}.json"));
    let expected: Ratios = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
    let golden = Golden::load(&json)?;
    let of = &golden.settings;
    let mut chosen = sparsity(method, of.sparsity_ratio, Pattern::Unstructured);
    chosen.allocate = allocate;
    let settings = golden.run_of(chosen, shared, cache)?;
    Ok((job::prune(settings, &Silent, None)?, golden, expected))
}

#[test]
fn owl_gives_the_layers_the_ratios_of_the_reference() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let cache = tempfile::tempdir()?;
    for (name, method) in [
        ("stories-0.6", "wanda"),
        ("stories-0.7", "wanda"),
        ("stories-0.7-sparsegpt", "sparsegpt"),
        ("wikitext-llama-8m-0.7", "wanda"),
    ] {
        let of = (name, method);
        let (manifest, golden, expected) = run(of, Allocation::Owl, &shared, cache.path())?;
        let perplexity = manifest.perplexity.pruned.context("it was asked for")?;
        let report = manifest.pruning.context("this run prunes")?;
        let ratios = report.allocation.context("ratios were measured")?.ratios;
        let pairs = ratios.iter().zip(&expected.layer_sparsity);
        let worst = pairs.map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f64::max);
        let off = perplexity.perplexity / golden.ppl - 1.0;
        show(&format!("owl {name}: ratios within {worst:.1e}, perplexity {off:+.1e}"));
        assert_eq!(ratios.len(), expected.layer_sparsity.len());
        assert!(worst <= EQUAL, "{name}: {ratios:?} {:?}", expected.layer_sparsity);
        assert!(off.abs() <= PERPLEXITY, "{name}: {}", perplexity.perplexity);
        assert_eq!(report.layer_ratios, Some(ratios));
    }
    Ok(())
}

#[test]
fn ratios_that_were_tried_are_not_worse_than_those_by_outliers() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let cache = tempfile::tempdir()?;
    for of in [("stories-0.7", "wanda"), ("stories-0.7-sparsegpt", "sparsegpt")] {
        let (manifest, golden, _) = run(of, Allocation::Error, &shared, cache.path())?;
        let perplexity = manifest.perplexity.pruned.context("it was asked for")?;
        let report = manifest.pruning.context("this run prunes")?;
        let allocation = report.allocation.context("ratios were measured")?;
        let rules: Vec<&str> = allocation.tried.iter().map(|one| &*one.rule).collect();
        assert_eq!(rules, ["error", "owl", "uniform"]);
        assert!(allocation.tried.iter().all(|one| one.loss.is_some()));
        assert_eq!(allocation.measured[0].len(), allocation.points.len());
        let mean = allocation.ratios.iter().sum::<f64>() / allocation.ratios.len() as f64;
        assert!((mean - golden.settings.sparsity_ratio).abs() < 1e-9, "{mean}");
        let off = perplexity.perplexity / golden.ppl - 1.0;
        show(&format!("error {}: perplexity {off:+.1e} of owl's", of.0));
        assert!(off <= PERPLEXITY, "{of:?}: {}", perplexity.perplexity);
    }
    Ok(())
}
