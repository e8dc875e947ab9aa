//! The state that all layers of a model share: rotary tables, scratch memory and memory settings.

use super::config::ModelConfig;
use super::rotary::Rotary;
use crate::linalg::{CodedActivations, Products, Workspace};
use crate::run::MemorySettings;

/// Rotary tables, scratch memory and memory settings of a model's layers.
#[derive(Debug)]
pub struct LayerContext {
    /// The tables of each of the configuration's ropes.
    pub(super) rotaries: Vec<Rotary>,
    pub(super) workspace: Workspace,
    pub(super) settings: MemorySettings,
}

impl LayerContext {
    /// A context for sequences of up to `seqlen` tokens, cached tokens included, with the default memory settings.
    pub fn new(config: &ModelConfig, seqlen: usize) -> Self {
        Self::with_settings(config, seqlen, MemorySettings::default())
    }

    /// A context for sequences of up to `seqlen` tokens.
    pub fn with_settings(config: &ModelConfig, seqlen: usize, settings: MemorySettings) -> Self {
        let rotaries = config.ropes.iter().map(|rope| Rotary::new(rope, seqlen)).collect();
        Self { rotaries, workspace: Workspace::new(), settings }
    }

    /// The same context with this arithmetic of products. Weights stay packed only after this call, if the memory settings say so.
    #[must_use]
    pub fn with_products(mut self, products: Products) -> Self {
        let context = self.workspace.product_context();
        context.products = products;
        context.keeps_packed = self.settings.keeps_packed();
        self
    }

    /// The same context with these activations of products of 8-bit codes.
    #[must_use]
    pub fn with_coded_activations(mut self, activations: CodedActivations) -> Self {
        self.workspace.product_context().activations = activations;
        self
    }

    /// The memory settings.
    pub fn settings(&self) -> &MemorySettings {
        &self.settings
    }

    pub(super) fn rotaries(&self) -> &[Rotary] {
        &self.rotaries
    }

    /// The scratch memory, for products outside a layer.
    pub fn workspace(&mut self) -> &mut Workspace {
        &mut self.workspace
    }
}
