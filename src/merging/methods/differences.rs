//! Methods that add differences from the base, after trimming, election and averaging.
//!
//! ```text
//! D_t = W_t − W₀
//! T_t = trim(D_t), times Σ|D_t| / Σ|T_t| with `rescale`
//! V_t = w_t T_t                              w_t a_tj² T_t with statistics of the experts
//! s   = sign(Σ_t V_t)                        zero: plus (mergekit), or the sign of most sums (paper)
//! M   = Σ_t V_t [sign V_t = s] / n           without election: Σ_t V_t / n
//! n   = Σ_t w_t [sign V_t = s]               with `normalize`; 0 becomes 1; the paper counts models
//! W   = W₀ + λ M
//! ```
//!
//! W₀, W_t: `[rows, columns]`; w_t, λ: numbers; a_tj²: mean square of input column j under expert t. All arithmetic is f32, in the
//! order above; the result is rounded once, where it is written.
//!
//! Source: mergekit 0.1.5, `merge_methods/generalized_task_arithmetic.py`; P. Yadav et al., "TIES-Merging" (2023, arXiv:2306.01708) and
//! the authors' code.

use anyhow::Result;
use pulp::{Arch, Simd, WithSimd};

use super::group::Group;
use super::method::{
    BoxedMerge, MergeMethod, MethodSettings, RowBlock, Scope, Semantics, SourceTask, TensorMerge,
    TensorTask,
};
use super::mixer::{Divisor, Formula, Mixer, Mixture, Share};
use super::sums::absolute;
use super::trim::{Trim, Trimmer};
use super::trim_plan::{SearchPlan, Trimming, trim_of};
use crate::linalg::order_statistics::Counts;
use crate::merging::recipe::{BaseModel, Declaration, Declared, Parameter, WhenMissing};

/// A method of this kind.
#[derive(Debug, Clone)]
pub(super) struct DifferenceMethod {
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    pub(super) trimming: Trimming,
    /// True if the entries that disagree with the elected sign are left out.
    pub(super) elects: bool,
    pub(super) per_model: &'static [Declared],
    pub(super) shared: &'static [Declared],
}

/// Parameters of every method: the weight is required.
pub(super) const WEIGHT: Declared = (Parameter::Weight, WhenMissing::Required);
/// Everything is kept unless a recipe says otherwise.
pub(super) const DENSITY: Declared = (Parameter::Density, WhenMissing::Is(1.0));

/// Shared parameters with these defaults.
pub(super) const fn shared(normalize: bool, rescale: bool) -> [Declared; 4] {
    const fn is(on: bool) -> WhenMissing {
        WhenMissing::Is(if on { 1.0 } else { 0.0 })
    }
    [
        (Parameter::Normalize, is(normalize)),
        (Parameter::Rescale, is(rescale)),
        (Parameter::Lambda, WhenMissing::Is(1.0)),
        (Parameter::Int8Mask, WhenMissing::Is(0.0)),
    ]
}

impl MergeMethod for DifferenceMethod {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: self.name,
            base_model: BaseModel::Required,
            models: 1..=usize::MAX,
            per_model: self.per_model,
            shared: self.shared,
        }
    }

    fn summary(&self) -> &'static str {
        self.summary
    }

    fn scope(&self, settings: &MethodSettings) -> Scope {
        let by_magnitude = matches!(self.trimming, Trimming::Magnitude | Trimming::Band);
        match (by_magnitude, settings.scope, settings.semantics) {
            (false, ..) => Scope::Tensor,
            (true, Some(scope), _) => scope,
            (true, None, Semantics::Mergekit | Semantics::Peft) => Scope::Tensor,
            (true, None, Semantics::Paper) => Scope::Model,
        }
    }

    fn searches(&self, experts: usize) -> usize {
        let has_density = self.per_model.iter().any(|(of, _)| *of == Parameter::Density);
        if has_density { experts } else { 0 }
    }

    fn uses_saliency(&self) -> bool {
        matches!(self.trimming, Trimming::Magnitude | Trimming::Random | Trimming::Ramp)
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, group: &'a Group) -> Result<BoxedMerge<'a>> {
        let experts: Result<Vec<Expert>> =
            task.experts().map(|(at, source)| Expert::new(self, task, at, source, group)).collect();
        let experts = experts?;
        let is_paper = task.settings.semantics == Semantics::Paper;
        let mut reads = Vec::new();
        if experts.iter().any(|expert| expert.search.is_some()) {
            reads.extend([Read::Search, Read::Search]);
        }
        let trims = experts.iter().any(|expert| !expert.keeps_all());
        let rescales = task.shared.is_on(Parameter::Rescale) && trims && !self.is_unbiased(task);
        if rescales {
            reads.push(Read::Norms);
        }
        if self.elects && is_paper {
            reads.push(Read::Signs);
        }
        let normalize = task.shared.is_on(Parameter::Normalize);
        Ok(Box::new(Differences {
            tensor: task.name.to_string(),
            columns: task.columns,
            base: task.base,
            group,
            reads,
            rescales,
            elects: self.elects,
            divisor: match (normalize, is_paper && self.elects) {
                (_, true) => Divisor::Count,
                (true, false) => Divisor::Weights,
                (false, false) => Divisor::One,
            },
            lambda: task.shared.get(Parameter::Lambda).unwrap_or(1.0) as f32,
            tie: 1.0,
            counts: Vec::new(),
            norms: Vec::new(),
            balance: 0,
            trimmed: vec![Vec::new(); experts.len()],
            experts,
        }))
    }
}

impl DifferenceMethod {
    /// States that kept entries are divided by their probability, so that no norm has to be matched.
    fn is_unbiased(&self, task: &TensorTask<'_>) -> bool {
        let has_squares = task.experts().any(|(_, source)| source.squares.is_some());
        matches!(self.trimming, Trimming::Random | Trimming::Ramp)
            && (task.settings.semantics == Semantics::Paper || has_squares)
    }
}

/// A read before the merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    Search,
    Norms,
    Signs,
}

/// An expert of a tensor.
#[derive(Debug)]
struct Expert {
    /// Its index in the sources.
    source: usize,
    weight: f32,
    /// w_t a_tj² per column; empty if all columns have the weight w_t.
    votes: Vec<f32>,
    search: Option<SearchPlan>,
    trimmer: Trimmer,
    factor: f32,
    fixed: Trim,
}

impl Expert {
    fn new(
        method: &DifferenceMethod,
        task: &TensorTask<'_>,
        at: usize,
        source: &SourceTask<'_>,
        group: &Group,
    ) -> Result<Self> {
        let weight = source.values.number(Parameter::Weight) as f32;
        let (fixed, search) =
            trim_of(method.trimming, method.scope(task.settings), task, source, group)?;
        let squares = source.squares.filter(|_| task.settings.squares_vote);
        let votes = squares
            .map_or(Vec::new(), |squares| squares.iter().map(|square| weight * square).collect());
        Ok(Self {
            source: at,
            weight,
            votes,
            search,
            trimmer: Trimmer::new(fixed.clone()),
            factor: 1.0,
            fixed,
        })
    }

    fn keeps_all(&self) -> bool {
        self.search.is_none() && self.trimmer.keeps_all()
    }
}

/// The merge of a tensor.
struct Differences<'a> {
    tensor: String,
    columns: usize,
    base: Option<usize>,
    group: &'a Group,
    reads: Vec<Read>,
    rescales: bool,
    elects: bool,
    divisor: Divisor,
    lambda: f32,
    /// The sign of entries whose sum is zero.
    tie: f32,
    counts: Vec<Option<Counts>>,
    /// Per expert Σ|D| before and after trimming.
    norms: Vec<[f64; 2]>,
    balance: i64,
    /// Per expert the trimmed difference of the current rows.
    trimmed: Vec<Vec<f32>>,
    experts: Vec<Expert>,
}

impl Differences<'_> {
    /// Takes what the group has measured, at the beginning of a read.
    fn learn(&mut self) {
        for (at, expert) in self.experts.iter_mut().enumerate() {
            let found = expert.search.as_ref().zip(self.group.found(at));
            let trim =
                found.map_or_else(|| expert.fixed.clone(), |(search, found)| search.trim(&found));
            expert.trimmer = Trimmer::new(trim);
            expert.factor = match self.rescales && !expert.keeps_all() {
                true => self.group.factor(at),
                false => 1.0,
            };
        }
    }

    /// The base's rows.
    fn base<'b>(&self, rows: &RowBlock<'b>) -> &'b [f32] {
        rows.sources[self.base.unwrap_or(0)]
    }

    /// Computes D_t of every expert.
    fn subtract(&mut self, rows: &RowBlock<'_>) {
        let base = self.base(rows);
        for (expert, difference) in self.experts.iter().zip(&mut self.trimmed) {
            subtract(rows.sources[expert.source], base, difference);
        }
    }

    /// Computes T_t of every expert.
    fn trim(&mut self, rows: &RowBlock<'_>) {
        self.subtract(rows);
        let columns = self.columns;
        for (expert, difference) in self.experts.iter_mut().zip(&mut self.trimmed) {
            expert.trimmer.trim(rows.first_row, columns, difference);
            if expert.factor != 1.0 {
                difference.iter_mut().for_each(|value| *value *= expert.factor);
            }
        }
    }

    /// The sum of the norms of all rows.
    fn norm(difference: &[f32], columns: usize, sum: &mut f64) {
        for row in difference.chunks(columns) {
            *sum += absolute(row);
        }
    }
}

impl TensorMerge for Differences<'_> {
    fn reads(&self) -> usize {
        self.reads.len()
    }

    fn measure(&mut self, read: usize, rows: &RowBlock<'_>) {
        let is_first = rows.first_row == 0;
        if is_first {
            self.learn();
        }
        let columns = self.columns;
        match self.reads[read] {
            Read::Search => {
                if is_first {
                    let experts = self.experts.iter().enumerate();
                    self.counts = experts
                        .map(|(at, expert)| {
                            let search = expert.search.as_ref()?;
                            Some(self.group.counts(at, &search.positions))
                        })
                        .collect();
                }
                self.subtract(rows);
                for (counts, difference) in self.counts.iter_mut().zip(&self.trimmed) {
                    if let Some(counts) = counts {
                        counts.add(difference);
                    }
                }
            }
            Read::Norms => {
                if is_first {
                    self.norms = vec![[0.0; 2]; self.experts.len()];
                }
                self.subtract(rows);
                let experts = self.experts.iter_mut().zip(&mut self.trimmed);
                for ((expert, difference), norms) in experts.zip(&mut self.norms) {
                    Self::norm(difference, columns, &mut norms[0]);
                    expert.trimmer.trim(rows.first_row, columns, difference);
                    Self::norm(difference, columns, &mut norms[1]);
                }
            }
            Read::Signs => {
                if is_first {
                    self.balance = 0;
                }
                self.trim(rows);
                for at in 0..self.base(rows).len() {
                    let shares = self.experts.iter().zip(&self.trimmed);
                    let sum: f32 = shares
                        .map(|(expert, trimmed)| expert.vote(at % columns) * trimmed[at])
                        .sum();
                    self.balance += i64::from(sum > 0.0) - i64::from(sum < 0.0);
                }
            }
        }
    }

    fn measured(&mut self, read: usize) {
        match self.reads[read] {
            Read::Search => {
                for (at, counts) in self.counts.drain(..).enumerate() {
                    if let Some(counts) = counts {
                        self.group.add_counts(at, &counts);
                    }
                }
            }
            Read::Norms => {
                let norms = std::mem::take(&mut self.norms);
                self.group.add_norms(&self.tensor, norms);
            }
            Read::Signs => self.group.add_signs(self.balance),
        }
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        if rows.first_row == 0 {
            self.learn();
            if self.reads.contains(&Read::Signs) {
                self.tie = self.group.majority();
            }
        }
        self.trim(rows);
        let shares = self.experts.iter().zip(&self.trimmed);
        let mixture = Mixture {
            columns: self.columns,
            base: self.base(rows),
            shares: shares
                .map(|(expert, trimmed)| Share {
                    weight: expert.weight,
                    votes: &expert.votes,
                    trimmed,
                })
                .collect(),
            elects: self.elects,
            divisor: self.divisor,
            lambda: self.lambda,
            tie: self.tie,
        };
        mixer.mix(&Formula::Mixture(mixture), merged)
    }

    fn kept(&self) -> Vec<u64> {
        let experts = self.experts.iter();
        experts.map(|expert| expert.trimmer.kept()).collect()
    }
}

impl Expert {
    /// w_t, or w_t a_tj².
    fn vote(&self, column: usize) -> f32 {
        self.votes.get(column).copied().unwrap_or(self.weight)
    }
}

/// Computes W_t − W₀ of as many elements as the base has.
pub(super) fn subtract(from: &[f32], base: &[f32], difference: &mut Vec<f32>) {
    difference.resize(base.len(), 0.0);
    Arch::new().dispatch(Subtract { from, base, difference });
}

struct Subtract<'a> {
    from: &'a [f32],
    base: &'a [f32],
    difference: &'a mut [f32],
}

impl WithSimd for Subtract<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let pairs = self.from.iter().zip(self.base);
        for (difference, (from, base)) in self.difference.iter_mut().zip(pairs) {
            *difference = from - base;
        }
    }
}
