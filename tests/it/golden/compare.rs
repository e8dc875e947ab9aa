//! Comparison of a run with the reference's: samples, statistics, masks bit by bit, perplexity.

use std::collections::BTreeSet;

use anyhow::Result;
use prune::pipeline::{MaskObserver, PrunedMatrix};
use prune::pruning::{ColumnSquares, Pattern, Statistics};
use prune::run::{Manifest, TextProtocol};

use super::reference::{Golden, Settings};

/// Of all bits of a model, and of those of any one matrix, this many must be equal.
const EQUAL_IN_MODEL: f64 = 0.9999;
const EQUAL_IN_MATRIX: f64 = 0.999;
/// Of all bits of a model, this many must be equal after a near-tie of an earlier layer fell the other way. Measured: 99.952 % at least.
const EQUAL_AFTER_A_TIE: f64 = 0.999;
/// The largest distance, relative to the threshold, of the score of a differing bit: a few steps of f32 (1.2e-7),
/// since statistics summed in another order move scores by about that.
const NEAR_TIE: f64 = 1e-6;
/// The same in layers after one whose mask differs by a near-tie: their inputs differ too. Up to 4.8e-5 was seen.
const NEAR_TIE_AFTER_ANOTHER: f64 = 1e-4;
/// Relative error of statistics: f32 rounding in the middle; cancelled columns, fed by earlier layers' rounding, at most.
const STATISTICS_MEDIAN: f64 = 1e-6;
const STATISTICS_MAX: f64 = 1e-4;
/// Relative error of perplexity. Dense: the reference sums its losses in f32. Pruned: a near-tie may change a weight.
pub(super) const DENSE_PERPLEXITY: f64 = 1e-5;
const PRUNED_PERPLEXITY: f64 = 1e-3;

/// A bit that differs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Difference {
    row: usize,
    column: usize,
    we_prune: bool,
    score: f32,
    /// The score of the threshold: the lowest score we keep where we prune, the highest we prune where we keep.
    threshold: f32,
}

impl Difference {
    /// The distance to the threshold on the other side, relative to it.
    fn distance(&self) -> f64 {
        let (score, threshold) = (f64::from(self.score), f64::from(self.threshold));
        match (score - threshold).abs() {
            0.0 => 0.0,
            gap => gap / threshold.abs(),
        }
    }
}

/// The bits in which our mask and the reference's packed one differ, with the scores that decided them.
///
/// Scores are recomputed here: |W|·√s where there are statistics, else |W|. Weights compete within an aligned group (N:M), a
/// row (Wanda) or the matrix (magnitude); of n that compete and k that we prune, the thresholds are the k-th and the
/// (k+1)-th lowest score.
pub(super) fn differences(
    matrix: &PrunedMatrix<'_>,
    rule: Rule,
    reference: &[u8],
) -> Vec<Difference> {
    let (rows, columns) = (matrix.weight.rows(), matrix.weight.columns());
    assert_eq!(reference.len(), (rows * columns).div_ceil(8), "packed bits of one matrix");
    if matrix.mask.bits() == reference {
        return Vec::new();
    }
    let scores = scores(matrix, rule);
    let competing = match (matrix.target.pattern, rule) {
        (Pattern::NOfM { m, .. }, _) => m,
        (Pattern::Unstructured, Rule::Wanda | Rule::RiaPerRow) => columns,
        (Pattern::Unstructured, Rule::Magnitude | Rule::Ria) => rows * columns,
    };
    let we_prune = |element: usize| matrix.mask.is_pruned(element / columns, element % columns);
    let mut found = Vec::new();
    for first in (0..rows * columns).step_by(competing) {
        let elements = first..first + competing;
        let differs = |&element: &usize| {
            we_prune(element) != (reference[element / 8] >> (element % 8) & 1 == 1)
        };
        if !elements.clone().any(|element| differs(&element)) {
            continue;
        }
        let mut ascending = scores[elements.clone()].to_vec();
        ascending.sort_by(f32::total_cmp);
        let pruned = elements.clone().filter(|&element| we_prune(element)).count();
        let highest_pruned = pruned.checked_sub(1).map_or(f32::NEG_INFINITY, |k| ascending[k]);
        let lowest_kept = ascending.get(pruned).copied().unwrap_or(f32::INFINITY);
        found.extend(elements.filter(differs).map(|element| Difference {
            row: element / columns,
            column: element % columns,
            we_prune: we_prune(element),
            score: scores[element],
            threshold: if we_prune(element) { lowest_kept } else { highest_pruned },
        }));
    }
    found
}

/// s_j of the matrix's input; empty for methods without statistics.
fn mean_squares<'a>(matrix: &PrunedMatrix<'a>) -> &'a [f32] {
    let squares = matrix.statistics.and_then(Statistics::downcast);
    squares.map_or(&[], |squares: &ColumnSquares| squares.mean())
}

/// The formula of a score, and the weights that compete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    Wanda,
    Magnitude,
    Ria,
    RiaPerRow,
}

impl Rule {
    pub(super) fn of(settings: &Settings) -> Self {
        match (settings.method.as_str(), settings.threshold.as_str()) {
            ("ria", "per output row") => Self::RiaPerRow,
            ("ria", _) => Self::Ria,
            ("magnitude", _) => Self::Magnitude,
            _ => Self::Wanda,
        }
    }

    /// Our name of the method.
    pub(super) fn method(self) -> &'static str {
        match self {
            Self::Wanda => "wanda",
            Self::Magnitude => "magnitude",
            Self::Ria => "ria",
            Self::RiaPerRow => "ria-per-row",
        }
    }
}

fn scores(matrix: &PrunedMatrix<'_>, rule: Rule) -> Vec<f32> {
    let columns = matrix.weight.columns();
    let mut scores = vec![0.0; matrix.weight.elements()];
    matrix.weight.widen_rows(0, &mut scores);
    if let Rule::Ria | Rule::RiaPerRow = rule {
        return ria_scores(&scores, columns, mean_squares(matrix));
    }
    for (element, score) in scores.iter_mut().enumerate() {
        let factor = mean_squares(matrix).get(element % columns).map_or(1.0, |mean| mean.sqrt());
        *score = score.abs() * factor;
    }
    scores
}

/// (|W_ij| / Σ_i |W_ij| + |W_ij| / Σ_j |W_ij|) · s_j^¼ in f64, rounded once.
fn ria_scores(weights: &[f32], columns: usize, squares: &[f32]) -> Vec<f32> {
    let mut of_columns = vec![0.0f64; columns];
    for row in weights.chunks_exact(columns) {
        for (sum, weight) in of_columns.iter_mut().zip(row) {
            *sum += f64::from(weight.abs());
        }
    }
    let mut scores = Vec::with_capacity(weights.len());
    for row in weights.chunks_exact(columns) {
        let of_row: f64 = row.iter().map(|weight| f64::from(weight.abs())).sum();
        for ((weight, of_column), square) in row.iter().zip(&of_columns).zip(squares) {
            let weight = f64::from(weight.abs());
            let relative = weight / of_column + weight / of_row;
            scores.push((relative * f64::from(*square).powf(0.25)) as f32);
        }
    }
    scores
}

/// |ours - reference| / |reference|.
pub(super) fn relative(ours: f64, reference: f64) -> f64 {
    if ours == reference { 0.0 } else { (ours - reference).abs() / reference.abs() }
}

/// Not the case for NaN.
pub(super) fn within(error: f64, tolerance: f64) -> bool {
    error <= tolerance
}

/// One matrix, compared.
struct Matrix {
    name: String,
    layer: usize,
    bits: usize,
    /// Differing bits; unknown (`None`) where the hashes differ and the reference saved no bits.
    differing: Option<usize>,
}

impl Matrix {
    fn equal(&self) -> f64 {
        1.0 - self.differing.unwrap_or(self.bits) as f64 / self.bits as f64
    }
}

/// Watches a run and keeps what differs.
pub(super) struct Comparison<'a> {
    golden: &'a Golden,
    matrices: Vec<Matrix>,
    statistics: Vec<f64>,
    statistics_seen: BTreeSet<String>,
    /// Perplexity is compared.
    pub(super) is_measured: bool,
    /// Deviations, one line each.
    pub(super) failures: Vec<String>,
    /// Differing bits that are near-ties, one line each.
    pub(super) notes: Vec<String>,
    /// Differing bits that are no near-ties by themselves, one line each.
    pub(super) far: Vec<String>,
}

impl MaskObserver for Comparison<'_> {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let name = matrix.id.full_name(matrix.layer);
        self.statistics(&name, mean_squares(matrix));
        if self.golden.settings.method == "dense" {
            if matrix.mask.count() > 0 {
                self.fail(format!("{name}: a dense run prunes"));
            }
            return Ok(());
        }
        let Some(linear) = self.golden.per_linear.get(&name) else {
            self.fail(format!("{name}: the reference has no such matrix"));
            return Ok(());
        };
        if linear.shape != [matrix.weight.rows(), matrix.weight.columns()] {
            self.fail(format!("{name}: the reference has the shape {:?}", linear.shape));
            return Ok(());
        }
        // The variant's bisection may stop at another share when a near-tie moves the sparsity across its tolerance.
        if matrix.mask.count() != linear.pruned && !self.golden.settings.variant {
            let count = matrix.mask.count();
            self.fail(format!("{name}: {count} pruned, reference {}", linear.pruned));
        }
        let is_equal = matrix.mask.sha256() == linear.mask_sha256;
        let differing = match self.golden.masks.as_ref().map(|masks| masks.get(&name)) {
            Some(Some(bits)) => {
                let differences = differences(matrix, Rule::of(&self.golden.settings), bits);
                if differences.is_empty() != is_equal {
                    self.fail(format!("{name}: bits and hash of the reference disagree"));
                }
                self.list(matrix.layer, &name, &differences);
                Some(differences.len())
            }
            Some(None) => {
                self.fail(format!("{name}: no mask among those saved"));
                None
            }
            None => is_equal.then_some(0),
        };
        self.matrices.push(Matrix {
            name,
            layer: matrix.layer,
            bits: matrix.weight.elements(),
            differing,
        });
        Ok(())
    }
}

impl<'a> Comparison<'a> {
    pub(super) fn new(golden: &'a Golden) -> Self {
        Self {
            golden,
            matrices: Vec::new(),
            statistics: Vec::new(),
            statistics_seen: BTreeSet::new(),
            is_measured: true,
            failures: Vec::new(),
            notes: Vec::new(),
            far: Vec::new(),
        }
    }

    fn fail(&mut self, what: String) {
        self.failures.push(format!("{}: {what}", self.golden.name));
    }

    fn statistics(&mut self, name: &str, ours: &[f32]) {
        let golden = self.golden;
        let Some(reference) = golden.statistics.as_ref().and_then(|all| all.get(name)) else {
            return;
        };
        self.statistics_seen.insert(name.to_owned());
        if ours.len() == reference.len() {
            let pairs = ours.iter().zip(reference);
            self.statistics.extend(
                pairs.map(|(ours, reference)| relative(f64::from(*ours), f64::from(*reference))),
            );
        } else {
            self.fail(format!("{name}: {} statistics, reference {}", ours.len(), reference.len()));
        }
    }

    fn list(&mut self, layer: usize, name: &str, differences: &[Difference]) {
        let is_after_another =
            self.matrices.iter().any(|matrix| matrix.layer < layer && matrix.differing != Some(0));
        let near = if is_after_another { NEAR_TIE_AFTER_ANOTHER } else { NEAR_TIE };
        for bit in differences {
            let line = format!(
                "{name} row {} column {}: {} by us only, score {:e}, threshold {:e}, {:.1e} apart",
                bit.row,
                bit.column,
                if bit.we_prune { "pruned" } else { "kept" },
                bit.score,
                bit.threshold,
                bit.distance()
            );
            if bit.distance() <= near {
                self.notes.push(format!("{}: {line}", self.golden.name));
            } else {
                self.far.push(format!("{}: {line}", self.golden.name));
            }
        }
    }

    /// The rest of the checks, once the run is over, and the row of the table.
    pub(super) fn finish(&mut self, manifest: &Manifest) -> String {
        self.check_calibration(manifest.calibration.as_ref());
        self.check_masks(manifest);
        let statistics = self.check_statistics();
        let perplexity = manifest.perplexity.pruned.map(|report| report.perplexity);
        let perplexity = match self.is_measured {
            true => self.check_perplexity(perplexity),
            false => "not measured | –".to_string(),
        };
        let matrices = self.matrices.len();
        let equal = self.matrices.iter().filter(|matrix| matrix.differing == Some(0)).count();
        let bits: usize = self.matrices.iter().map(|matrix| matrix.bits).sum();
        let differing: usize =
            self.matrices.iter().map(|matrix| matrix.differing.unwrap_or(matrix.bits)).sum();
        let masks =
            match self.matrices.iter().min_by(|one, other| one.equal().total_cmp(&other.equal())) {
                None => "– | – | –".to_owned(),
                Some(_) if differing == 0 => {
                    format!("{equal} / {matrices} | {bits} / {bits} | 100 %")
                }
                Some(worst) => format!(
                    "{equal} / {matrices} | {} / {bits} | {} {:.4} %",
                    bits - differing,
                    worst.name.trim_start_matches("model."),
                    100.0 * worst.equal()
                ),
            };
        format!("| {} | {masks} | {statistics} | {perplexity} |", self.golden.name)
    }

    /// Compares the tokens behind the statistics; nothing where neither side has any, or where the reference drew
    /// samples that no one used (magnitude, dense).
    fn check_calibration(&mut self, record: Option<&TextProtocol>) {
        let Some(record) = record else {
            if ["wanda", "ria"].contains(&self.golden.settings.method.as_str()) {
                self.fail("no calibration samples, but the reference has some".to_owned());
            }
            return;
        };
        let golden = self.golden;
        if Some(&record.starts) != golden.calibration_starts.as_ref() {
            self.fail(format!("other starts: {:?}", record.starts));
        }
        if Some(&record.tokens_sha256) != golden.calibration_tokens_sha256_int32le.as_ref() {
            self.fail(format!("other calibration tokens: {}", record.tokens_sha256));
        }
    }

    fn check_masks(&mut self, manifest: &Manifest) {
        if self.matrices.len() != self.golden.per_linear.len() {
            let (ours, reference) = (self.matrices.len(), self.golden.per_linear.len());
            self.fail(format!("{ours} matrices pruned, reference {reference}"));
        }
        let sparsity = manifest.sparsity.map(|report| (report.zeros, report.zeros_before));
        if self.golden.per_linear.is_empty()
            && sparsity.is_none_or(|(after, before)| after != before)
        {
            self.fail("a dense run changed weights".to_owned());
        }
        let bits: usize = self.matrices.iter().map(|matrix| matrix.bits).sum();
        let differing: usize =
            self.matrices.iter().map(|matrix| matrix.differing.unwrap_or(matrix.bits)).sum();
        // A near-tie that the reference has recorded may fall the other way, and move bits of later layers.
        let first = self.matrices.iter().find(|matrix| matrix.differing != Some(0));
        let first = first.and_then(|matrix| self.golden.per_linear.get(&matrix.name));
        let began_at_tie = first.is_some_and(|linear| linear.near_ties_1e_5 > 0);
        if began_at_tie && differing as f64 <= (1.0 - EQUAL_AFTER_A_TIE) * bits as f64 {
            self.notes.append(&mut self.far);
            return;
        }
        self.failures.append(&mut self.far);
        if (differing as f64) > (1.0 - EQUAL_IN_MODEL) * bits as f64 {
            self.fail(format!("{differing} of {bits} bits differ"));
        }
        let bad = |matrix: &&Matrix| matrix.differing.is_none() || matrix.equal() < EQUAL_IN_MATRIX;
        let bad: Vec<_> =
            self.matrices.iter().filter(bad).map(|matrix| matrix.name.clone()).collect();
        if !bad.is_empty() {
            self.fail(format!("another mask: {}", bad.join(", ")));
        }
    }

    fn check_statistics(&mut self) -> String {
        let Some(expected) = &self.golden.statistics else {
            return "–".to_owned();
        };
        if !expected.keys().eq(&self.statistics_seen) {
            let (ours, reference) = (self.statistics_seen.len(), expected.len());
            self.fail(format!("statistics of {ours} matrices, reference {reference}"));
        }
        self.statistics.sort_by(f64::total_cmp);
        let median = self.statistics.get(self.statistics.len() / 2).copied().unwrap_or(f64::NAN);
        let max = self.statistics.last().copied().unwrap_or(f64::NAN);
        if !within(median, STATISTICS_MEDIAN) || !within(max, STATISTICS_MAX) {
            self.fail(format!(
                "statistics are off by {median:.1e} in the median, {max:.1e} at most"
            ));
        }
        format!("{median:.1e} / {max:.1e}")
    }

    fn check_perplexity(&mut self, ours: Option<f64>) -> String {
        let (ours, reference) = (ours.unwrap_or(f64::NAN), self.golden.ppl);
        let tolerance = match self.golden.settings.method.as_str() {
            "dense" => DENSE_PERPLEXITY,
            _ => PRUNED_PERPLEXITY,
        };
        let error = relative(ours, reference);
        if !within(error, tolerance) {
            self.fail(format!("perplexity {ours}, reference {reference}: {error:.1e} apart, {tolerance:.0e} allowed"));
        }
        format!("{ours:.4} / {reference:.4} | {error:.1e}")
    }
}
