//! Where a decoder layer can be watched, and by whom.

/// The four distinct inputs of a layer's seven linears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Observation {
    /// The normed hidden states: input of q, k and v.
    AttentionInput,
    /// The attention's context: input of o.
    OInput,
    /// The normed hidden states after attention: input of gate and up.
    MlpInput,
    /// silu(gate)·up: input of down.
    DownInput,
}

impl Observation {
    /// All four, in the order a layer passes them.
    pub const ALL: [Self; 4] = [
        Self::AttentionInput,
        Self::OInput,
        Self::MlpInput,
        Self::DownInput,
    ];
}

/// What an observer wants to see at one point. A later method that needs a Gram matrix adds it here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nothing: the layer skips the call.
    Nothing,
    /// Every row of the input.
    Rows,
}

/// Watches the inputs of a layer's linears while a sample passes through.
pub trait Observer: Send {
    /// What it wants at a point.
    fn needs(&self, point: Observation) -> Need;

    /// Takes some rows `[tokens, in_features]` of the current sample; several calls per sample may split the rows, in order.
    fn observe(&mut self, point: Observation, rows: &[f32]);

    /// The positions of the current sample whose rows are kept as they are, ascending; a device sends these along with sums.
    fn keeps(&self, point: Observation) -> &[usize];

    /// What [`Observer::observe`] makes of some rows where these stay on a device.
    ///
    /// # Arguments
    /// * `squares`: Σ x² over those rows, `[in_features]`
    /// * `kept`: those of them that [`Observer::keeps`] names, `[rows, in_features]`
    fn observe_sums(&mut self, point: Observation, squares: &[f32], kept: &[f32]);
}
