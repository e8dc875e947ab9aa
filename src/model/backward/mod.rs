//! The backward pass: gradients of a decoder layer and of the head, from recomputed activations.
//!
//! Training sweeps over the layers twice. The forward sweep keeps each layer's input. The head gives the loss and its gradient with respect
//! to the last hidden states ([`Head::loss_gradient`](super::Head::loss_gradient)). The reverse sweep reads the layers from the last to the
//! first, and each layer turns the gradient of its output into the gradient of its input
//! ([`DecoderLayer::backward`](super::DecoderLayer::backward)). Gradients of weights are added up in [`LayerGradients`], sample by sample.
//!
//! Everything is written by hand on slices: candle's operators keep all activations of a layer, and its matrix product computes the
//! gradient of frozen weights too. `differentiable` is the oracle of the tests.
//!
//! | file | content |
//! | --- | --- |
//! | `gradients` | the gradients of a layer's weights, added up in f32 over the samples of a step |
//! | `head` | the loss of a language model and its gradient with respect to the last hidden states, for some tokens at a time |

mod gradients;
mod head;
#[cfg(test)]
mod tests;

pub use gradients::LayerGradients;
pub use head::TeacherStates;
