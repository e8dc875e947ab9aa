//! Planning on numbers alone. So far: what memory this machine has to give.

pub mod inventory;
