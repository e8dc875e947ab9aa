//! Buffers of attention: the groups of key/value heads it is computed in, and their place in the workspace.

use std::ops::Range;

use crate::linalg::attention::Heads;
use crate::linalg::parts::{LEAST_COLUMNS, parts};
use crate::run::MemorySettings;

/// Groups of key/value heads that are computed in turn, and the buffers a group needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionLayout {
    heads: Heads,
    seqlen: usize,
    hidden_size: usize,
    /// Largest number of key/value heads per group.
    at_most: usize,
    /// Smallest number of key/value heads per group.
    at_least: usize,
}

impl AttentionLayout {
    /// The layout for samples of `seqlen` tokens.
    pub(super) fn new(
        heads: Heads,
        seqlen: usize,
        hidden_size: usize,
        settings: &MemorySettings,
    ) -> Self {
        Self {
            heads,
            seqlen,
            hidden_size,
            at_most: settings.attention_heads.unwrap_or(usize::MAX),
            // The keys of a group are a part of a product, which has a smallest width.
            at_least: LEAST_COLUMNS.div_ceil(heads.head_dim.max(1)),
        }
    }

    /// Ranges of key/value heads.
    pub(super) fn groups(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        parts(self.heads.num_key_value_heads, self.at_most, self.at_least)
    }

    /// Widths of the query, key and value products of each group.
    pub(super) fn group_columns(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let layout = *self;
        layout.groups().map(move |group| {
            let keys = layout.key_columns(&group).len();
            [layout.query_columns(&group).len(), keys, keys]
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

    /// Columns of a group's keys among all keys; they are the rows of the weight.
    pub(super) fn key_columns(&self, group: &Range<usize>) -> Range<usize> {
        group.start * self.heads.head_dim..group.end * self.heads.head_dim
    }

    /// Columns of a group's queries among all queries.
    pub(super) fn query_columns(&self, group: &Range<usize>) -> Range<usize> {
        let keys = self.key_columns(group);
        keys.start * self.queries_per_key()..keys.end * self.queries_per_key()
    }

    /// Elements of the five buffers: normed states; q, k and v of the largest group; context. With a single group the context
    /// takes the place of the normed states.
    pub(super) fn buffers(&self) -> [usize; 5] {
        let largest = self.groups().map(|group| group.len()).max().unwrap_or(0);
        let keys = self.seqlen * largest * self.heads.head_dim;
        let queries = keys * self.queries_per_key();
        let (normed, context) = (self.seqlen * self.hidden_size, self.seqlen * self.query_width());
        if self.groups().len() > 1 {
            [normed, queries, keys, keys, context]
        } else {
            [normed.max(context), queries, keys, keys, 0]
        }
    }

    /// The buffer of the context, out of the first and the last of [`AttentionLayout::buffers`].
    pub(super) fn context<'a>(&self, shared: &'a mut [f32], apart: &'a mut [f32]) -> &'a mut [f32] {
        let length = self.seqlen * self.query_width();
        if self.groups().len() > 1 { apart } else { &mut shared[..length] }
    }
}
