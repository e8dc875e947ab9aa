//! Merge methods: mathematics on rows of f32, without files, models or devices.
//!
//! W = f(W₁ … Wₙ), tensor by tensor. A method sees the rows of a tensor in order and in pieces of any size. Its result does not
//! depend on the pieces: sums over a tensor are added row by row in f64 (`sums`), order statistics are counted in integers
//! (`linalg::order_statistics`), and random numbers belong to elements (`random`).
//!
//! | file | content |
//! | --- | --- |
//! | `method` | [`MergeMethod`], [`TensorMerge`], what they are told |
//! | `linear`, `slerp`, `model_stock`, `passthrough`, `regmean_diag`, `sce`, `nearswap`, `arcee_fusion` | a method per file |
//! | `nuslerp`, `karcher`, `multislerp` | methods on a sphere, by file |
//! | `products` | their shared steps: scalar products of models, and combinations of models |
//! | `task_arithmetic`, `ties`, `dare`, `della`, `breadcrumbs` | methods that add differences from the base |
//! | `differences` | the shared steps of these methods: trim, elect, average |
//! | `mixer` | [`Formula`], the elementwise end of a merge, and its computation on the CPU |
//! | `trim_plan` | the trim of an expert, from a method's settings |
//! | `trim` | the choice of the entries of a difference |
//! | `softmax` | the divergence of rows, in PyTorch's order of operations |
//! | `group` | tensors that are trimmed together |
//! | `random` | random numbers by tensor and element |
//! | `sums` | sums of rows in a fixed order |

mod arcee_fusion;
mod breadcrumbs;
mod dare;
mod della;
mod differences;
mod group;
mod karcher;
mod linear;
mod method;
mod mixer;
mod model_stock;
mod multislerp;
mod nearswap;
mod nuslerp;
mod passthrough;
mod products;
mod random;
mod regmean_diag;
mod sce;
mod slerp;
mod softmax;
mod sums;
mod task_arithmetic;
mod ties;
mod trim;
mod trim_plan;

pub use group::Group;
pub use method::{
    BoxedMerge, MergeMethod, MethodSettings, RowBlock, Scope, Semantics, SourceTask, TensorMerge,
    TensorTask,
};
pub use mixer::{Divisor, Formula, Mixer, Mixture, OnCpu, Share, WeightedSum};
pub use random::{Stream, uniform};
pub use sums::{dot, sign_conflicts, square_distance, weighted_square_distance};

/// All methods, in the order of the help text.
pub const METHODS: [&dyn MergeMethod; 19] = [
    &linear::LinearAverage,
    &slerp::Slerp,
    &nuslerp::Nuslerp,
    &multislerp::Multislerp,
    &karcher::Karcher,
    &task_arithmetic::TASK_ARITHMETIC,
    &ties::TIES,
    &dare::DARE_LINEAR,
    &dare::DARE_TIES,
    &della::DELLA,
    &della::DELLA_LINEAR,
    &breadcrumbs::BREADCRUMBS,
    &breadcrumbs::BREADCRUMBS_TIES,
    &sce::Sce,
    &model_stock::ModelStock,
    &nearswap::Nearswap,
    &arcee_fusion::ArceeFusion,
    &passthrough::Passthrough,
    &regmean_diag::RegmeanDiag,
];

/// The method of this name.
pub fn method(name: &str) -> Option<&'static dyn MergeMethod> {
    METHODS.into_iter().find(|method| method.declaration().name == name)
}
