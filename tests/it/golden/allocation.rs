//! OWL's ratios, against the reference's.

use anyhow::{Context, Result};
use prune::job;
use prune::pipeline::allocation::Allocation;
use prune::pruning::Pattern;
use prune::run::Silent;
use prune::settings::{CalibrationSettings, ComputeDtype, EvalSides, Settings};
use serde::Deserialize;

use super::reference::{Golden, dataset};
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
        let json = shared.join(format!("goldens/methods/owl/{name}.json"));
        let expected: Ratios = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
        let golden = Golden::load(&json)?;
        let of = &golden.settings;
        let mut settings = Settings::pruning(shared.join("models").join(&of.model));
        settings.model.dtype = ComputeDtype::F32;
        let mut chosen = sparsity(method, of.sparsity_ratio, Pattern::Unstructured);
        chosen.allocate = Allocation::Owl;
        settings.sparsity = Some(chosen);
        settings.calibration = Some(CalibrationSettings {
            dataset: dataset(&shared, &of.train)?.parse()?,
            nsamples: u32::try_from(of.nsamples)?,
            seed: of.seed,
        });
        settings.seqlen = Some(of.seqlen);
        settings.evaluation.eval = EvalSides::Pruned;
        settings.evaluation.text_cache = Some(cache.path().to_path_buf());
        settings.evaluation.eval_dataset = dataset(&shared, &of.test)?.parse()?;
        let manifest = job::prune(settings, &Silent, None)?;
        let perplexity = manifest.perplexity.pruned.context("it was asked for")?;
        let report = manifest.pruning.context("this run prunes")?;
        let ratios = report.allocation.context("ratios were measured")?.ratios;
        let pairs = ratios.iter().zip(&expected.layer_sparsity);
        let worst = pairs
            .map(|(ours, theirs)| (ours - theirs).abs())
            .fold(0.0, f64::max);
        let off = perplexity.perplexity / golden.ppl - 1.0;
        show(&format!(
            "owl {name}: ratios within {worst:.1e}, perplexity {off:+.1e}"
        ));
        assert_eq!(ratios.len(), expected.layer_sparsity.len());
        assert!(
            worst <= EQUAL,
            "{name}: {ratios:?} {:?}",
            expected.layer_sparsity
        );
        assert!(off.abs() <= PERPLEXITY, "{name}: {}", perplexity.perplexity);
        assert_eq!(report.layer_ratios, Some(ratios));
    }
    Ok(())
}
