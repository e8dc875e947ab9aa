//! The large steps of methods that repair: Gram matrices, factorisations, and products with a Gram matrix.
//!
//! Operations counted: a Gram matrix takes n² per row of inputs, both triangles together; a Cholesky factorisation n³ / 3, a
//! triangular inverse n³ / 3, the product of a triangle with its transpose n³ / 3. A multiplication and an addition are two.

use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use prune::linalg::Products;
use prune::linalg::factor::{inverse, inverse_factor};
use prune::linalg::gram::{GramMatrix, f32_kernel};
use prune::linalg::product::{Factor, Kernel, Packed, ProductJob, Values, products};

use super::{OfPeak, against, against_nothing, noise};

/// Widths of the inputs of q/k/v, o, gate, up and of down in the 7B shape.
const WIDTHS: [usize; 2] = [4096, 11008];

/// Rows of inputs, and rows of a weight.
const ROWS: usize = 4096;

/// A matrix that is positive definite: small noise, symmetric, and a diagonal larger than the sums of rows.
fn positive(n: usize) -> Vec<f32> {
    let mut h = noise(n * n);
    for row in 0..n {
        for column in 0..row {
            h[row * n + column] = h[column * n + row];
        }
        h[row * n + row] = n as f32;
    }
    h
}

pub(super) fn repairs(criterion: &mut Criterion<OfPeak>) {
    let mut group = criterion.benchmark_group("repairs");
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    for n in WIDTHS {
        let cube = (n as u64).pow(3);
        let rows = noise(ROWS * n);
        against(f32_kernel());
        group.throughput(Throughput::Elements((ROWS * n * n) as u64));
        // The first rows would also wait for the system's memory.
        let mut gram = GramMatrix::new(n, Products::F32);
        gram.add_rows(&rows);
        group.bench_function(BenchmarkId::new("Gram matrix of 4096 rows", n), |bencher| {
            bencher.iter(|| gram.add_rows(&rows));
        });
        drop(gram);
        let h = positive(n);
        group.throughput(Throughput::Elements((2 * ROWS * n * n) as u64));
        group.bench_function(BenchmarkId::new("4096 rows × Gram matrix", n), |bencher| {
            let (mut out, mut packed) = (vec![0.0; ROWS * n], Packed::default());
            bencher.iter(|| {
                let job = ProductJob {
                    weight: Factor::Stored(Values::F32(&h)),
                    columns: n,
                    out: &mut out,
                    stride: n,
                    adds: false,
                };
                products(f32_kernel(), &rows, n, &mut [job], &mut packed);
            });
        });
        against(Kernel::Fused);
        group.throughput(Throughput::Elements(2 * cube / 3));
        group.bench_function(BenchmarkId::new("factor of the inverse", n), |bencher| {
            bencher.iter_batched_ref(
                || h.clone(),
                |h| inverse_factor(h, n),
                BatchSize::PerIteration,
            );
        });
        group.throughput(Throughput::Elements(cube));
        group.bench_function(BenchmarkId::new("inverse", n), |bencher| {
            bencher.iter_batched_ref(|| h.clone(), |h| inverse(h, n), BatchSize::PerIteration);
        });
    }
    group.finish();
    against_nothing();
}
