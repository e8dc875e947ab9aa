//! [`Example`]: a text to learn from.

/// An example: token ids and targets. The target of a token is the next token, if its loss counts.
#[derive(Debug, Clone, Copy)]
pub struct Example<'a> {
    /// `[seqlen]`
    pub tokens: &'a [u32],
    /// `[seqlen]`
    pub targets: &'a [Option<u32>],
}

impl Example<'_> {
    pub(super) fn predicted(&self) -> usize {
        self.targets.iter().flatten().count()
    }
}
