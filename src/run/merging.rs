//! Records of a merge: what was counted in each tensor.

use serde::{Deserialize, Serialize};

use super::measured::{PerplexityReport, TextProtocol};
use super::verification::VerifiedFile;
use crate::bytes::ByteSize;

/// A merge, in the record of its run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MergeReport {
    /// `merge_method` of the recipe.
    pub method: String,
    /// `--semantics`: the tool or paper whose definition is followed.
    pub semantics: String,
    /// The entries that are trimmed together: `tensor`, `layer` or `model`, with `--saliency` each `row` of a linear. Absent for methods
    /// that do not trim by magnitude.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trim_scope: Option<String>,
    /// The seed of random masks.
    pub seed: u64,
    /// The models, the base first.
    pub models: Vec<InputModel>,
    /// The resolved recipe, as YAML.
    pub recipe: String,
    /// Decoder layers of the output.
    pub num_hidden_layers: usize,
    /// Rows of the output's embedding.
    pub vocab_size: usize,
    /// The decision on different vocabularies; absent if the models share a vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<VocabularyReport>,
    /// The dtype of the output, the widest of its tensors.
    pub dtype: String,
    /// Tensors of the inputs that the output does not have.
    pub left_out: Vec<String>,
    /// Bytes of the merge pass: read, and written.
    pub bytes: [ByteSize; 2],
    /// `--saliency` and its statistics; absent without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saliency: Option<SaliencyReport>,
    /// The adapter that `--semantics peft` combined; absent without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub combined_adapter: Option<CombinedAdapter>,
    /// Perplexities of the inputs, in the order of `models`, then of the merged model. Empty without evaluation, and in the record
    /// beside the weights, which is written before the evaluation.
    #[serde(default)]
    pub perplexities: Vec<ModelPerplexity>,
    /// Per layer of the output with several sources: its distances from the models. Empty in records of older versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<MergedLayer>,
    /// Per tensor of the output, in its order.
    pub tensors: Vec<MergedTensor>,
}

impl MergeReport {
    /// The same without the paths of this machine, for files that are published.
    #[must_use]
    pub fn without_paths(&self, recipe: String, shown: impl Fn(&str) -> String) -> Self {
        let name_of = |name: &str| match name.split_once('+') {
            Some((base, adapter)) => format!("{}+{}", shown(base), shown(adapter)),
            None => shown(name),
        };
        let models = self.models.iter().map(|model| InputModel {
            name: name_of(&model.name),
            path: shown(&model.path),
            adapter: model.adapter.as_deref().map(&shown),
            ..model.clone()
        });
        let measured = |of: &MeasuredActivations| MeasuredActivations {
            model: name_of(&of.model),
            dataset: match of.dataset.split_once(':') {
                Some((name, path)) => format!("{name}:{}", shown(path)),
                None => shown(&of.dataset),
            },
            ..of.clone()
        };
        let saliency = self.saliency.as_ref().map(|saliency| SaliencyReport {
            file: shown(&saliency.file),
            models: saliency.models.iter().map(measured).collect(),
            ..saliency.clone()
        });
        let vocabulary = self
            .vocabulary
            .as_ref()
            .map(|of| VocabularyReport { source: name_of(&of.source), ..of.clone() });
        let perplexities = self.perplexities.iter().map(|row| ModelPerplexity {
            model: name_of(&row.model),
            text: row.text.published(),
            ..row.clone()
        });
        Self {
            models: models.collect(),
            perplexities: perplexities.collect(),
            recipe,
            vocabulary,
            combined_adapter: self
                .combined_adapter
                .as_ref()
                .map(|of| CombinedAdapter { folder: shown(&of.folder), ..of.clone() }),
            saliency,
            ..self.clone()
        }
    }

    /// The output errors over all linears; `None` without statistics.
    pub fn output_errors(&self) -> Option<OutputErrors> {
        let errors = self.tensors.iter().filter_map(|tensor| tensor.output_errors);
        errors.reduce(|sum, error| OutputErrors {
            before: sum.before.zip(error.before).map(|(sum, error)| sum + error),
            after: sum.after + error.after,
        })
    }
}

/// An input of a merge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputModel {
    /// The model as the recipe names it.
    pub name: String,
    /// True for the model that differences are taken from.
    pub is_base: bool,
    /// The folder that was read.
    pub path: String,
    /// The commit on the hub; absent for a local folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The folder of its adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// The fingerprint of its weights, the adapter's after it.
    pub fingerprint: String,
}

/// The vocabulary of a merged model. Lists have at most 1000 tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VocabularyReport {
    /// `base`, `union`, `truncated`, or the model whose tokenizer the output has.
    pub source: String,
    /// Rows of embedding and head.
    pub rows: usize,
    /// Rows of tokens; the rest is padding.
    pub tokens: usize,
    /// Tokens that were added to the tokenizer.
    pub added: usize,
    /// Their texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added_tokens: Vec<String>,
    /// Tokens of the models that the output has not.
    pub dropped: usize,
    /// Their texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dropped_tokens: Vec<String>,
    /// Tokens that no merged model has a row for.
    pub zero: usize,
    /// Their texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zero_tokens: Vec<String>,
}

/// An adapter that was combined from the models' adapters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CombinedAdapter {
    /// Its folder.
    pub folder: String,
    /// The election of signs: `total` or `frequency`; absent for methods without an election.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub majority_sign: Option<String>,
    /// Its files.
    pub files: Vec<VerifiedFile>,
}

/// The statistics of a merge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SaliencyReport {
    /// `--saliency`: `base` or `experts`; absent where statistics serve the output errors alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// The file of the statistics.
    pub file: String,
    /// The statistics that were used, the base's first.
    pub models: Vec<MeasuredActivations>,
}

/// The activations of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredActivations {
    /// The model as the recipe named it.
    pub model: String,
    /// The text.
    pub dataset: String,
    /// Samples.
    pub nsamples: u32,
    /// Tokens per sample.
    pub seqlen: u64,
    /// The seed that selected the samples.
    pub seed: u64,
}

/// The name of the merged model among [`MergeReport::perplexities`].
pub const MERGED: &str = "merged";

/// The perplexity of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelPerplexity {
    /// The model as the recipe names it, or `merged`.
    pub model: String,
    /// Its perplexity.
    #[serde(flatten)]
    pub report: PerplexityReport,
    /// The text, by the model's own tokenizer.
    pub text: TextProtocol,
}

/// A tensor of a merged model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MergedTensor {
    /// Its name in the output.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Elements that are zero.
    pub zeros: u64,
    /// Elements that are zero in every input and were kept so; absent without `--keep-zeros`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_zeros: Option<u64>,
    /// Entries of each expert's difference that were kept, for methods that trim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<u64>,
    /// Output errors; absent without statistics of its input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_errors: Option<OutputErrors>,
    /// The distances from its sources; empty outside of layers, and for a tensor with one source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub distances: Vec<SourceDistance>,
    /// Elements that an expert has above the base and another has below it; absent without a base and two experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sign_conflicts: Option<u64>,
}

/// The distance of a merged tensor, as it is written, from one of its sources.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceDistance {
    /// The index of the source's model in `models`.
    pub model: usize,
    /// Σ (W − W_t)².
    pub square_distance: f64,
    /// Σ W_t².
    pub square_norm: f64,
}

/// A layer of a merged model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MergedLayer {
    /// Its index in the output.
    pub layer: usize,
    /// ‖W − W_t‖ / ‖W_t‖ over the linears and norms of the layer, in the order of `models`; null for a model that the layer has no
    /// tensor of.
    pub distances: Vec<Option<f64>>,
    /// The share of elements that an expert has above the base and another has below it; absent without a base and two experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sign_conflicts: Option<f64>,
}

impl MergedLayer {
    /// The layer number `layer` of a merge of `models` models, from the sums of its tensors in the order of the output. `None` where no
    /// tensor was compared.
    pub fn of<'a>(
        layer: usize,
        models: usize,
        tensors: impl Iterator<Item = &'a MergedTensor>,
    ) -> Option<Self> {
        let mut sums = vec![[0.0; 2]; models];
        let [mut conflicts, mut elements] = [0, 0];
        for tensor in tensors {
            for of in &tensor.distances {
                let sums = sums.get_mut(of.model)?;
                sums[0] += of.square_distance;
                sums[1] += of.square_norm;
            }
            if let Some(count) = tensor.sign_conflicts {
                conflicts += count;
                elements += tensor.shape.iter().product::<usize>() as u64;
            }
        }
        let distance = |[distance, norm]: [f64; 2]| (norm > 0.0).then(|| (distance / norm).sqrt());
        let distances: Vec<Option<f64>> = sums.into_iter().map(distance).collect();
        let share = (elements > 0).then(|| conflicts as f64 / elements as f64);
        distances.iter().any(Option::is_some).then_some(Self {
            layer,
            distances,
            sign_conflicts: share,
        })
    }
}

/// Σ_t E‖x_t (W − W_t)ᵀ‖² over the experts, to diagonal order: Σ_t Σ_ij a_tj² (W − W_t)_ij², with a_tj² the mean square of input j.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputErrors {
    /// With the base model's tensor as W; absent for a tensor without a base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<f64>,
    /// With the merged tensor as W.
    pub after: f64,
}
