//! Scratch memory of a decoder layer, reused for every sample of every layer.
//!
//! Attention, MLP and head cut the same memory into their buffers. So it is as large as the largest of the three needs, not their sum.

use super::buffer_pool::grow;
use super::weight::ProductContext;

/// A growing buffer of activations, and the rows of a weight that are multiplied at once.
#[derive(Debug, Default)]
pub struct Workspace {
    product_context: ProductContext,
    activations: Vec<f32>,
}

impl Workspace {
    /// An empty workspace; buffers grow to their final size with the first sample.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lends activation buffers of these lengths in elements, with unspecified content, and the rest of the workspace.
    pub fn buffers<const N: usize>(
        &mut self,
        lengths: [usize; N],
    ) -> ([&mut [f32]; N], &mut ProductContext) {
        let mut rest = grow(&mut self.activations, lengths.iter().sum());
        let buffers = lengths.map(|length| {
            let (buffer, behind) = std::mem::take(&mut rest).split_at_mut(length);
            rest = behind;
            buffer
        });
        (buffers, &mut self.product_context)
    }

    /// Lends only the context of products.
    pub fn product_context(&mut self) -> &mut ProductContext {
        &mut self.product_context
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_cut_from_one_that_only_grows() {
        let mut workspace = Workspace::new();
        let ([first, second, none], _) = workspace.buffers([3, 5, 0]);
        assert_eq!((first.len(), second.len(), none.len()), (3, 5, 0));
        first.fill(1.0);
        second.fill(2.0);
        let ([all], _) = workspace.buffers([8]);
        assert_eq!(all, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
        assert_eq!(workspace.buffers([4, 5]).0.map(|buffer| buffer.len()), [4, 5]);
    }
}
