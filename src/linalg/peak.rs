//! The CPU's peak, measured in the same run as everything it is compared with: multiply-adds on registers and nothing else.

use std::hint::black_box;
use std::time::Instant;

use pulp::{Arch, Simd, WithSimd};

use super::bf16::Kernel;

/// Multiply-adds in flight at once: latency 4 or 5 times 2 units, and few enough for the 16 registers of AVX2.
const CHAINS: usize = 12;

/// f32 GFLOP/s of so many threads together. Takes some tenths of a second.
pub fn f32(threads: usize) -> f64 {
    // A twentieth of a second: long against starting the threads.
    const ROUNDS: usize = 20_000_000;
    best(threads, &|| 2 * CHAINS * chains(ROUNDS) * ROUNDS)
}

/// GFLOP/s of a kernel for bf16 products, f32 sums, of so many threads together. Takes some tenths of a second.
pub fn bf16(kernel: Kernel, threads: usize) -> f64 {
    best(threads, &|| kernel.spin())
}

/// The best of three runs after one that wakes the cores up; `work` returns the operations it did.
fn best(threads: usize, work: &(dyn Fn() -> usize + Sync)) -> f64 {
    let run = || {
        let start = Instant::now();
        let operations: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let operations = workers.into_iter().map(|worker| worker.join().unwrap_or(0));
            operations.sum()
        });
        operations as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    run();
    (0..3).map(|_| run()).fold(0.0, f64::max)
}

/// Runs the chains and returns the lanes of one register.
fn chains(rounds: usize) -> usize {
    Arch::new().dispatch(Chains(rounds))
}

struct Chains(usize);

impl WithSimd for Chains {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        let (x, y) = (
            simd.splat_f32s(black_box(0.999)),
            simd.splat_f32s(black_box(1e-3)),
        );
        let mut sums = [simd.splat_f32s(0.0); CHAINS];
        for _ in 0..self.0 {
            for sum in &mut sums {
                *sum = simd.mul_add_f32s(*sum, x, y);
            }
        }
        black_box(sums.map(|sum| simd.reduce_sum_f32s(sum)));
        S::F32_LANES
    }
}
