//! Numerics: weights in their stored dtype, products, blocked attention, selection.
//!
//! This room does not know models, files or pruning methods. All products of the program go through [`Linear`] or
//! [`matmul::matmul`], so kernels can change without a change of layers.
//!
//! | file | content |
//! | --- | --- |
//! | `assignment` | the linear sum assignment problem |
//! | `attention` | causal attention in blocks of queries and keys, without a `[heads, seq, seq]` tensor |
//! | `bitmask` | rows of a matrix as a bit mask and the kept elements, on stored bytes |
//! | `buffer_pool` | a pool of buffers for the tasks of a parallel loop |
//! | `columns` | sums over the tokens of an activation, column by column, in f64 |
//! | `compact` | a weight matrix without its zeros: a bit per weight, and the kept values |
//! | `convert` | conversion between stored bytes and f32, for rows that are read and written in pieces |
//! | `derivatives` | derivatives of the row- and element-wise steps (`elementwise`), and of the losses, on slices and all threads |
//! | `distillation` | the loss of a student that learns from tokens and from a teacher's logits, and its gradient |
//! | `dynamic_map` | the dynamic maps of 8-bit numbers: 256 values in [-1, 1] or [0, 1] whose spacing grows with their size |
//! | `eight` | eight elements at a time, moved as a table says |
//! | `elementwise` | row- and element-wise steps of a decoder layer, on slices and all threads, into the caller's memory |
//! | `exp` | e^x for slices, the costly part of softmax, SiLU and log-sum-exp |
//! | `expand` | rows with their zeros by AVX-512 VBMI2 |
//! | `factor` | Cholesky factors and inverses of symmetric positive definite matrices, in place, block by block |
//! | `gradient` | gradients of a linear y = x·Wᵀ + b, from the gradient of a loss with respect to y |
//! | `gram` | Gram matrices G = XᵀX of rows that arrive in parts, in f32 |
//! | `int8` | 8-bit codes of kept weights, with a scale for each row and 128 columns |
//! | `kernel` | CPU features of the products |
//! | `large_pages` | large pages for buffers of weights |
//! | `linear` | a linear layer with its weight in the stored dtype: y = x·Wᵀ + b |
//! | `low_rank` | a weight with a low-rank change that keeps its zeros, for training |
//! | `matmul` | dense products with strides, by the `gemm` crate |
//! | `nf4` | NF4: weights as 4-bit codes of 16 normal quantiles, with a scale per block of 64 |
//! | `one_token` | the product of one token: y = W·x on the stored weight, at the speed of memory |
//! | `parts` | even parts of work, without a short last part |
//! | `peak` | the peak speed of the CPU, measured |
//! | `permute` | permutations of rows and columns |
//! | `product` | C = X·Wᵀ with f32 sums, the products that take most of a run's time |
//! | `profile` | the profiler of arithmetic: time and operations of each part of a layer |
//! | `order_statistics` | order statistics of magnitudes, from histograms |
//! | `rectangles` | rectangles of a matrix, each written by one thread |
//! | `select` | selection of the k lowest scores, ties to the lower index, without sorting |
//! | `stored` | a weight matrix in its stored dtype |
//! | `tensor` | conversion between slices and candle tensors |
//! | `triangular` | the kernels of a block in `factor`: Cholesky factor, solutions with a triangle |
//! | `update` | C ← C − E·U in place, for columns of C from a given column on |
//! | `weight` | the weight of a linear: in memory, with or without its zeros, or at rest in a file from which some rows at a time are read |
//! | `workspace` | scratch memory of a decoder layer, reused for every sample of every layer |

pub mod assignment;
pub mod attention;
pub mod bitmask;
pub mod buffer_pool;
pub mod columns;
pub mod compact;
pub mod convert;
pub mod derivatives;
pub mod distillation;
pub mod dynamic_map;
mod eight;
pub mod elementwise;
pub mod exp;
mod expand;
pub mod factor;
#[cfg(test)]
pub(crate) mod golden_tests;
pub mod gradient;
pub mod gram;
pub mod int8;
pub mod kernel;
mod large_pages;
pub mod linear;
pub mod low_rank;
pub mod matmul;
pub mod nf4;
pub mod one_token;
pub mod order_statistics;
pub mod parts;
pub mod peak;
pub mod permute;
pub mod product;
pub mod profile;
mod rectangles;
pub mod select;
pub mod stored;
pub mod tensor;
pub mod triangular;
pub mod update;
pub mod weight;
pub mod workspace;

pub use compact::{CompactMatrix, CompactPart, KeptForm};
pub use linear::Linear;
pub use low_rank::{LowRank, MaskedLowRank, factor_parts_elements};
pub use stored::{StoredDtype, StoredMatrix};
pub use weight::{CodedActivations, MatrixAtRest, ProductContext, Products, RowSource, Weight};
pub use workspace::Workspace;
