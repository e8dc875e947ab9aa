//! Scratch memory of a decoder layer: taken once, reused for every sample of every layer.

/// Three growing buffers; what the forward pass needs beside its results.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Rows of a weight widened to f32 for one product.
    pub(super) panel: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Workspace {
    /// An empty workspace; buffers grow to their final size with the first sample.
    pub fn new() -> Self {
        Self::default()
    }

    /// Two activation buffers of `length` elements each, of unspecified content, and the rest of the workspace.
    pub fn two_buffers(&mut self, length: usize) -> (&mut [f32], &mut [f32], &mut Vec<f32>) {
        for buffer in [&mut self.first, &mut self.second] {
            if buffer.len() < length {
                buffer.resize(length, 0.0);
            }
        }
        (
            &mut self.first[..length],
            &mut self.second[..length],
            &mut self.panel,
        )
    }

    /// The buffer for widened weights alone.
    pub fn panel(&mut self) -> &mut Vec<f32> {
        &mut self.panel
    }
}
