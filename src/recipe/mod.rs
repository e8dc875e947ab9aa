//! Recipes of merges: which models, which method, which numbers for which tensor.
//!
//! | file | content |
//! | --- | --- |
//! | `parameter` | names of parameters, declarations of methods, values |

mod parameter;

pub use parameter::{BaseModel, Declaration, Declared, Otherwise, Parameter, Values};
