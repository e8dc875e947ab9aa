//! Recipes of merges: which models, which method, which numbers for which tensor.
//!
//! | file | content |
//! | --- | --- |
//! | `contents` | [`Recipe`] and its parts, as mergekit's YAML says them |
//! | `flags` | a recipe from flags of the command line |
//! | `write` | a recipe as YAML that mergekit reads |
//! | `resolve` | the inputs and the values of every tensor of the output |
//! | `mismatches` | tensors that the sources do not share |
//! | `parameter` | names of parameters, declarations of methods, values |
//! | `setting` | values over depth and by filter; the parameters of a scope |
//! | `model_spec` | `model@revision+adapter` |
//! | `tokenizer` | the vocabulary that a recipe asks for |
//! | `check` | what a method can have |
//! | `yaml` | YAML as values of serde, within limits |
//! | `place` | values with their lines |

mod check;
mod contents;
mod flags;
mod mismatches;
mod model_spec;
mod parameter;
mod place;
mod resolve;
mod setting;
mod tokenizer;
mod write;
mod yaml;

#[cfg(test)]
mod contents_tests;
#[cfg(test)]
mod resolve_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod yaml_tests;

pub use contents::{MergeInputs, ModelInput, OTHER_METHODS, Recipe, SliceRecipe, SliceSource};
pub use flags::FlagRecipe;
pub use model_spec::ModelSpec;
pub use parameter::{BaseModel, Declaration, Declared, Parameter, ParameterValues, WhenMissing};
pub use place::{Place, Placed};
pub use resolve::{ModelShape, Resolved, TensorRecipe, TensorSource};
pub use setting::{Case, Parameters, Setting};
pub use tokenizer::{TokenName, TokenRecipe, TokenRow, TokenizerRecipe, TokenizerSource};
pub use write::without_folders;
