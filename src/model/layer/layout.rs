//! Buffers of attention: the groups of key/value heads it is computed in, and their place in the workspace.

use std::ops::Range;

use crate::linalg::attention::Heads;
use crate::linalg::parts::{LEAST_COLUMNS, parts};
use crate::model::linears::LinearRole;
use crate::model::norms::NormRole;
use crate::model::spec::LayerSpec;
use crate::run::MemorySettings;

/// Groups of key/value heads that are computed in turn, and the buffers a group needs.
#[derive(Debug, Clone, Copy)]
pub(in crate::model) struct AttentionLayout {
    heads: Heads,
    seqlen: usize,
    /// Elements of the normed states.
    normed: usize,
    /// Largest number of key/value heads per group.
    at_most: usize,
    /// Smallest number of key/value heads per group.
    at_least: usize,
    /// The context takes the place of the normed states.
    is_shared: bool,
}

impl AttentionLayout {
    /// The layout for samples of `seqlen` tokens, of which nothing is kept. Norms over all heads need a single group.
    pub(in crate::model) fn new(
        spec: &LayerSpec,
        seqlen: usize,
        settings: &MemorySettings,
    ) -> Self {
        let is_whole = spec.family.head_norms_are_wide;
        let at_most = settings.attention_heads.filter(|_| !is_whole);
        let mut layout = Self::whole(spec, seqlen);
        layout.at_most = at_most.unwrap_or(usize::MAX);
        layout.is_shared = layout.groups().len() == 1;
        layout
    }

    /// All heads at once, with a context beside the normed states.
    pub(in crate::model) fn whole(spec: &LayerSpec, seqlen: usize) -> Self {
        Self {
            heads: spec.heads,
            seqlen,
            normed: match spec.has_norm(NormRole::BeforeAttention) {
                true => seqlen * spec.hidden_size,
                false => 0,
            },
            at_most: usize::MAX,
            // The keys of a group are a part of a product, which has a smallest width.
            at_least: LEAST_COLUMNS.div_ceil(spec.heads.head_dim.max(1)),
            is_shared: false,
        }
    }

    /// Ranges of key/value heads.
    pub(in crate::model) fn groups(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        parts(self.heads.num_key_value_heads, self.at_most, self.at_least)
    }

    /// Widths of the query, key and value products of each group.
    pub(in crate::model) fn group_columns(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let layout = *self;
        layout.groups().map(move |group| {
            let keys = layout.columns(LinearRole::K, &group).len();
            [layout.columns(LinearRole::Q, &group).len(), keys, keys]
        })
    }

    fn queries_per_key(&self) -> usize {
        self.heads.num_heads / self.heads.num_key_value_heads.max(1)
    }

    /// Columns of all queries.
    pub(super) fn query_width(&self) -> usize {
        self.heads.num_heads * self.heads.head_dim
    }

    /// Head counts of a group.
    pub(super) fn heads(&self, group: &Range<usize>) -> Heads {
        Heads {
            num_heads: group.len() * self.queries_per_key(),
            num_key_value_heads: group.len(),
            head_dim: self.heads.head_dim,
        }
    }

    /// Columns of a group's queries, keys or values among all heads; they are rows of the weight.
    pub(super) fn columns(&self, role: LinearRole, group: &Range<usize>) -> Range<usize> {
        let width = match role {
            LinearRole::Q => self.heads.head_dim * self.queries_per_key(),
            _ => self.heads.head_dim,
        };
        group.start * width..group.end * width
    }

    /// Elements of the five buffers: normed states; q, k and v of the largest group; context. With a single group the context
    /// takes the place of the normed states.
    pub(in crate::model) fn buffers(&self) -> [usize; 5] {
        let largest = self.groups().map(|group| group.len()).max().unwrap_or(0);
        let keys = self.seqlen * largest * self.heads.head_dim;
        let queries = keys * self.queries_per_key();
        let context = self.seqlen * self.query_width();
        match self.is_shared {
            true => [self.normed.max(context), queries, keys, keys, 0],
            false => [self.normed, queries, keys, keys, context],
        }
    }

    /// The buffer of the context, out of the first and the last of [`AttentionLayout::buffers`].
    pub(super) fn context<'a>(&self, normed: &'a mut [f32], apart: &'a mut [f32]) -> &'a mut [f32] {
        let length = self.seqlen * self.query_width();
        if self.is_shared { &mut normed[..length] } else { &mut apart[..length] }
    }
}
