//! Channel permutation against RIA's reference, which un-permutes its masks: the heuristic alone, and with the assignment behind it.
//! And the function of a real model whose channels were permuted while nothing was pruned.
//!
//! The reference permutes every matrix, which no checkpoint could hold, so a method of this test does that. The runs are made of the
//! parts of the program, since the table of methods does not have it.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::DType;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::data::{self, Draw, Role, Source, TextCache, Tokenizer};
use prune::eval::Perplexity;
use prune::job;
use prune::linalg::permute::{inverse, permute};
use prune::linalg::{CodedActivations, Products, StoredMatrix};
use prune::model::{Embedding, ModelConfig};
use prune::pipeline::{
    Calibrator, MaskObserver, Output, PrunedMatrix, Pruner, Selection, TargetPlan, embed,
};
use prune::pruning::method::Score;
use prune::pruning::methods::ria::Ria;
use prune::pruning::permutation::ChannelSearch;
use prune::pruning::{
    ColumnSquares, Mask, MethodOptions, Pattern, PruningMethod, Request, SparsityRule, Statistics,
    StatisticsKind, Technique,
};
use prune::ranks::Ranks;
use prune::run::{MemorySettings, Silent};
use prune::runtime::{Clock, Devices, HiddenStates, LayerSource, Passenger, Reporter, Side, Sweep};
use prune::settings::{CalibrationSettings, ComputeDtype, EvalSides, Settings};

use super::reference::{Golden, dataset};
use super::show;
use crate::support::{self, sparsity};

const TWO_OF_FOUR: (usize, usize) = (2, 4);

/// RIA with masks that are chosen in an order of the columns and brought back.
#[derive(Debug)]
struct Unpermuted {
    assigns: bool,
}

static DEALT: Unpermuted = Unpermuted { assigns: false };
static ASSIGNED: Unpermuted = Unpermuted { assigns: true };

impl PruningMethod for Unpermuted {
    fn name(&self) -> &'static str {
        "ria-unpermuted"
    }

    fn summary(&self) -> &'static str {
        "of tests"
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::NearRatio
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Ria::Matrix.statistics()
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        let score = Ria::Matrix.importance(weight, request)?;
        let search = ChannelSearch::new(weight, request, &*score, TWO_OF_FOUR);
        let mut order = search.deal()?;
        if self.assigns {
            order = search.assign(&order)?;
        }
        let mut squares = request.mean_squares()?.to_vec();
        permute(&mut squares, &order);
        let statistics = Statistics::Merged(Box::new(ColumnSquares::from_mean(squares)));
        let mut permuted = weight.clone();
        permuted.permute_columns(&order);
        let of_permuted = Request { statistics: Some(&statistics), ..*request };
        let mask = Ria::Matrix.prune(&mut permuted, &of_permuted)?;
        let places = inverse(&order);
        Mask::by_rows(
            weight.rows(),
            weight.columns(),
            || (),
            |(), row, bits| {
                bits.set_where(|column| mask.is_pruned(row, places[column]));
                Ok(())
            },
        )
    }
}

/// Prunes nothing, in any pattern.
#[derive(Debug)]
struct KeepsAll;

impl PruningMethod for KeepsAll {
    fn name(&self) -> &'static str {
        "keeps-all"
    }

    fn summary(&self) -> &'static str {
        "of tests"
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::NearRatio
    }

    fn importance(
        &self,
        _dense: &StoredMatrix,
        _request: &Request<'_>,
    ) -> Result<Box<Score<'static>>> {
        Ok(Box::new(|_| ()))
    }

    fn prune(&self, weight: &mut StoredMatrix, _request: &Request<'_>) -> Result<Mask> {
        Ok(Mask::none(weight.rows(), weight.columns()))
    }
}

/// Masks that are compared with a golden's.
struct Seen<'g> {
    golden: &'g Golden,
    differing: u64,
    bits: u64,
    worst: (f64, String),
}

impl MaskObserver for Seen<'_> {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let name = matrix.id.full_name(matrix.layer);
        let masks = self.golden.masks.as_ref().context("the golden has masks")?;
        let theirs = masks.get(&name).context("the golden has all masks")?;
        let pairs = matrix.mask.bits().iter().zip(theirs);
        let differing: u32 = pairs.map(|(a, b)| (a ^ b).count_ones()).sum();
        let bits = matrix.weight.elements() as u64;
        self.differing += u64::from(differing);
        self.bits += bits;
        let share = f64::from(differing) / bits as f64;
        if share > self.worst.0 {
            self.worst = (share, name);
        }
        Ok(())
    }
}

/// A model, and its tokens.
struct Model {
    config: Arc<ModelConfig>,
    source: Arc<dyn WeightSource>,
    tokenizer: Tokenizer,
}

impl Model {
    fn open(folder: &Path) -> Result<Self> {
        Ok(Self {
            config: Arc::new(ModelConfig::load(folder)?),
            source: Arc::new(Checkpoint::open(folder)?),
            tokenizer: Tokenizer::load(folder)?,
        })
    }

    fn hidden(&self, tokens: &[u32], seqlen: usize) -> Result<HiddenStates> {
        let samples = tokens.len() / seqlen;
        let width = self.config.hidden_size;
        let mut hidden = HiddenStates::new(None, samples, [seqlen, width], DType::F32)?;
        let embedding = Embedding::open(&*self.source, &self.config)?;
        embed(&mut hidden, &embedding, tokens, seqlen)?;
        Ok(hidden)
    }

    /// Prunes in groups of four.
    fn prune(
        &self,
        technique: &Technique,
        samples: Option<HiddenStates>,
        seqlen: usize,
        observer: Option<&mut dyn MaskObserver>,
        passengers: &mut [&mut dyn Passenger],
    ) -> Result<Vec<prune::run::manifest::LayerReport>> {
        let selection =
            Selection { sparsity_type: Pattern::NOfM { n: 2, m: 4 }, ..Selection::default() };
        let targets = TargetPlan::resolve(&selection, technique.method, &self.config)?;
        let clock = Clock::new();
        let reporter = Reporter { clock: &clock, events: &Silent };
        let calibrator = Calibrator::new(technique, samples, &self.config, reporter);
        let mut output = Output::default();
        if let Some(observer) = observer {
            output.observers.push(observer);
        }
        let mut pruner = Pruner::new(technique, &targets, calibrator, output, Vec::new());
        let sweep = Sweep {
            passed: 0,
            source: LayerSource::as_stored(Arc::clone(&self.source), Arc::clone(&self.config)),
            finished: None,
            seqlen,
            settings: MemorySettings::default(),
            products: Products::F32,
            activations: CodedActivations::default(),
            devices: &Devices::default(),
            ranks: Ranks::alone(),
            reporter,
        };
        sweep.run(Some(&mut pruner), passengers)?;
        Ok(pruner.into_layers())
    }
}

fn equals_the_golden(name: &str, method: &'static Unpermuted) -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let golden = Golden::load(&shared.join(format!("goldens/methods/ria/{name}.json")))?;
    let of = &golden.settings;
    let model = Model::open(&shared.join("models").join(&of.model))?;
    let source = Source::find(&dataset(&shared, &of.train)?.parse()?, Role::Calibration)?;
    let draw = Draw { nsamples: of.nsamples, seqlen: of.seqlen, seed: of.seed };
    let cache = TextCache::disabled();
    let samples = data::calibration(&source, &model.tokenizer, draw, &cache, &Silent)?;
    assert_eq!(Some(samples.protocol.tokens_sha256), golden.calibration_tokens_sha256_int32le);
    let mut seen = Seen { golden: &golden, differing: 0, bits: 0, worst: (0.0, String::new()) };
    let hidden = model.hidden(&samples.tokens, of.seqlen)?;
    let technique = Technique::of(method);
    model.prune(&technique, Some(hidden), of.seqlen, Some(&mut seen), &mut [])?;
    let (differing, bits) = (seen.differing, seen.bits);
    show(&format!(
        "{name}: {differing} of {bits} bits differ, worst {:.2e} in {}",
        seen.worst.0, seen.worst.1
    ));
    assert!(bits > 0);
    assert!(differing as f64 <= bits as f64 * 1e-4, "{name}: {differing} of {bits}");
    Ok(())
}

#[test]
fn columns_are_dealt_as_the_reference_deals_them() -> Result<()> {
    equals_the_golden("stories-2of4-reallocation", &DEALT)
}

#[test]
fn columns_are_assigned_as_the_reference_assigns_them() -> Result<()> {
    equals_the_golden("stories-2of4-reallocation-lsa", &ASSIGNED)
}

#[test]
fn a_model_with_permuted_channels_predicts_the_same() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let model = Model::open(&shared.join("models/stories260k"))?;
    let source = dataset(&shared, "stories.test.txt")?.parse()?;
    let source = Source::find(&source, Role::Evaluation)?;
    let (seqlen, cache) = (512, TextCache::disabled());
    let windows = source.evaluation(&model.tokenizer, seqlen, Some(8), &cache, &Silent)?;
    let clock = Clock::new();
    let reporter = Reporter { clock: &clock, events: &Silent };
    let side = |side| -> Result<Perplexity<'_>> {
        let hidden = model.hidden(&windows.tokens, seqlen)?;
        let layers = model.config.num_hidden_layers;
        let tokens = &windows.tokens;
        Ok(Perplexity::new(side, hidden, tokens, layers, reporter))
    };
    let (mut dense, mut permuted) = (side(Side::Dense)?, side(Side::Pruned)?);
    let technique = Technique { permutes: Some(4), ..Technique::of(&KeepsAll) };
    let layers = model.prune(&technique, None, seqlen, None, &mut [&mut dense, &mut permuted])?;
    for layer in &layers {
        let report = layer.permutation.context("it was permuted")?;
        assert!(report.kept_after > report.kept_before, "{report:?}");
    }
    let of = |side: &Perplexity<'_>| side.report().map(|report| report.perplexity);
    let (dense, permuted) = (of(&dense).context("dense")?, of(&permuted).context("permuted")?);
    show(&format!("dense {dense:.9}, permuted {permuted:.9}"));
    // The sums of down run in another order.
    assert!((permuted / dense - 1.0).abs() < 1e-6, "{dense} {permuted}");
    Ok(())
}

/// A run of 2:4 on a real model.
fn two_of_four(
    shared: &Path,
    (model, train, test): (&str, &str, &str),
    method: &str,
    is_permuted: bool,
    eval: EvalSides,
) -> Result<prune::run::Manifest> {
    let mut settings = Settings::pruning(shared.join("models").join(model));
    settings.model.dtype = ComputeDtype::F32;
    let mut chosen = sparsity(method, 0.5, Pattern::NOfM { n: 2, m: 4 });
    chosen.permute_channels = is_permuted;
    settings.sparsity = Some(chosen);
    settings.calibration = Some(CalibrationSettings {
        dataset: dataset(shared, train)?.parse()?,
        nsamples: 32,
        seed: 0,
    });
    settings.seqlen = Some(512);
    settings.evaluation.eval = eval;
    if eval != EvalSides::None {
        settings.evaluation.eval_dataset = dataset(shared, test)?.parse()?;
    }
    job::prune(settings, &Silent, None)
}

/// Models with the texts that they are pruned and measured with.
const MODELS: [(&str, &str, &str); 2] = [
    ("stories260k", "stories.train.txt", "stories.test.txt"),
    ("wikitext-llama-8m", "wiki.train.head1m.raw", "wiki.test.head1000.raw"),
];

#[test]
fn permuted_channels_keep_more_importance() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    for model in MODELS {
        for method in ["wanda", "ria"] {
            let permuted = two_of_four(&shared, model, method, true, EvalSides::None)?;
            for layer in &permuted.layers {
                let report = layer.permutation.context("it was permuted")?;
                assert!(report.kept_after > report.kept_before, "{model:?} {method}");
            }
        }
    }
    let plain = two_of_four(&shared, MODELS[0], "wanda", false, EvalSides::None)?;
    assert!(plain.layers.iter().all(|layer| layer.permutation.is_none()));
    Ok(())
}

#[test]
#[ignore = "the perplexities of docs/methods.md, which no test asks for"]
fn permuted_channels_and_their_perplexities() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let mut table = String::from(
        "\n| model | method | perplexity | permuted | kept by down | permuted |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for model in MODELS {
        for method in ["wanda", "ria"] {
            let run =
                |is_permuted| two_of_four(&shared, model, method, is_permuted, EvalSides::Pruned);
            let (plain, permuted) = (run(false)?, run(true)?);
            let (mut before, mut after) = (0.0, 0.0);
            for layer in &permuted.layers {
                let report = layer.permutation.context("it was permuted")?;
                before += report.kept_before;
                after += report.kept_after;
            }
            let of = |manifest: &prune::run::Manifest| {
                manifest.perplexity.pruned.map(|report| report.perplexity)
            };
            table += &format!(
                "| {} | {method} | {:.2} | {:.2} | {before:.5e} | {after:.5e} ({:+.2} %) |\n",
                model.0,
                of(&plain).context("measured")?,
                of(&permuted).context("measured")?,
                100.0 * (after / before - 1.0)
            );
        }
    }
    show(&table);
    Ok(())
}
