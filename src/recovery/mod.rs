//! Recovery training: what a pruned model lost is trained back, layer by layer, and its zeros stay zero.
//!
//! | file | story |
//! | --- | --- |
//! | `parameters` | what is trained in a layer: kept weights or low-rank factors, and norms; the layer that they make |
//! | `base` | the frozen weights of a layer and its mask, read ahead in both directions |
//! | `store` | values, gradients and optimizer states of all layers, in memory or in a file |
//! | `states` | the hidden states of a step: each layer's input for every example |
//! | `reuse` | memory that is used again |
//! | `example` | a text to learn from |
//! | `parts` | what a step works with |
//! | `trainer` | a step over the whole model: forward sweep, head, reverse sweep, clipping, update |
//! | `distill` | the dense model's last hidden states, whose logits a training of the whole model learns |
//! | `blocks` | an editor that trains each layer to reproduce the dense model's layer |
//! | `closing` | masks that close while a model trains |
//! | `merger` | an editor that writes trained layers |
//! | [`optimizers`] | optimizers, learning rates, clipping, rounding: the mathematics on slices |
//!
//! A step reads the weights of a layer twice, whatever the number of examples: all examples pass a layer before the next layer is
//! read. Memory holds one layer, its gradients and the hidden states, which may be on disk. With parameters in a file nothing grows with
//! the depth.

mod base;
mod blocks;
mod closing;
mod distill;
mod example;
mod merger;
pub mod optimizers;
mod parameters;
mod parts;
mod reuse;
mod states;
mod store;
mod trainer;

#[cfg(test)]
mod tests;

pub use base::{BaseLayers, BaseReader, MaskFile};
pub use blocks::{BlockTeacher, BlockTrainer};
pub use closing::{ChosenMask, ClosingMasks, ClosingRange, MaskReceiver};
pub use distill::Distillation;
pub use example::Example;
pub use merger::{LayerOutput, Merger};
pub use parameters::{
    BaseLayer, LayerParameters, ParameterName, ParameterSpec, TrainedForm, TrainedPart,
};
pub use parts::{Diverged, StepOutcome, TrainerParts};
pub use reuse::BufferReuse;
pub use store::{ChangedParameter, ParameterChange, ParameterStore, StorePlace};
pub use trainer::Trainer;
