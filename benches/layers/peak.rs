//! The CPU's f32 peak, measured in the same run as everything it is compared with: fused multiply-adds on registers.

use std::hint::black_box;
use std::time::Instant;

/// Multiply-adds that may be in flight at once: latency 4 times 2 units, with room to spare.
const CHAINS: usize = 24;

/// GFLOP/s of all threads together.
pub(crate) fn measure(threads: usize) -> f64 {
    // A tenth of a second: long against starting the threads.
    const ROUNDS: usize = 30_000_000;
    // A first run wakes the cores up.
    run(threads, ROUNDS);
    (0..3).map(|_| run(threads, ROUNDS)).fold(0.0, f64::max)
}

fn run(threads: usize, rounds: usize) -> f64 {
    let start = Instant::now();
    let lanes = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(move || chains(rounds)))
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(0))
            .max()
            .unwrap_or(0)
    });
    2.0 * (CHAINS * lanes * rounds * threads) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Runs the chains and returns the lanes of one register.
fn chains(rounds: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            #[expect(unsafe_code, reason = "calling a function compiled for a CPU feature")]
            // SAFETY: the feature was just detected.
            unsafe {
                avx512(rounds);
            }
            return 16;
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            #[expect(unsafe_code, reason = "calling a function compiled for CPU features")]
            // SAFETY: the features were just detected.
            unsafe {
                avx2(rounds);
            }
            return 8;
        }
    }
    let mut sums = [0.0f32; CHAINS];
    let (x, y) = (black_box(0.999f32), black_box(1e-3f32));
    for _ in 0..rounds {
        sums.iter_mut().for_each(|sum| *sum = *sum * x + y);
    }
    black_box(sums);
    1
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512(rounds: usize) {
    use std::arch::x86_64::*;
    let (x, y) = (
        _mm512_set1_ps(black_box(0.999)),
        _mm512_set1_ps(black_box(1e-3)),
    );
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        sums.iter_mut()
            .for_each(|sum| *sum = _mm512_fmadd_ps(*sum, x, y));
    }
    black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(rounds: usize) {
    use std::arch::x86_64::*;
    let (x, y) = (
        _mm256_set1_ps(black_box(0.999)),
        _mm256_set1_ps(black_box(1e-3)),
    );
    // 24 chains need more than AVX2's 16 registers; two sets of 12 do not.
    for _ in 0..2 {
        let mut sums = [_mm256_setzero_ps(); CHAINS / 2];
        for _ in 0..rounds {
            sums.iter_mut()
                .for_each(|sum| *sum = _mm256_fmadd_ps(*sum, x, y));
        }
        black_box(sums);
    }
}
