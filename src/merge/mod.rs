//! The merge pass: rows of several models in, rows of one model out, tensor by tensor.
//!
//! | file | content |
//! | --- | --- |
//! | `rows` | [`InputRows`], the rows of one tensor of one model in f32 |

mod rows;

pub use rows::InputRows;
