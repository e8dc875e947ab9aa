//! Executes a run: the sweep over the layers, the loader that reads ahead, the
//! layers of a model that writes, hidden states in RAM or on disk, and the
//! measurement of time and memory.

pub mod clock;
pub mod hidden_states;
pub mod layer_store;
pub mod loader;
pub mod memory;
pub mod sweep;

pub use clock::Clock;
pub use hidden_states::{HiddenStates, Rest};
pub use layer_store::LayerStore;
pub use loader::LayerLoader;
pub use sweep::{Editor, Passenger, Sweep};
