//! Derivatives of the row- and element-wise steps (`elementwise`), and of the losses, on slices and all threads.
//!
//! ```text
//! norm       y = x·r ∘ w, r = 1 / √(mean(x²) + ε):   dx = r·(dy ∘ w) − x·r³·mean(dy ∘ w ∘ x),   dw = Σ dy ∘ x·r
//! SiLU       y = silu(g) ∘ u, silu(g) = g·σ(g):       dg = dy ∘ u ∘ σ(g)(1 + g(1 − σ(g))),       du = dy ∘ silu(g)
//! GELU       y = g·σ(z) ∘ u, z = 2·√(2/π)·(g + 0.044715·g³): dg = dy ∘ u ∘ σ(z)(1 + g(1 − σ(z))·dz/dg), du = dy ∘ g·σ(z)
//! entropy    l = ln Σ e^z − z_target:                 dz = softmax(z) − [target]
//! square     l = (y − t)²:                            dy = 2 (y − t)
//! ```
//!
//! Sums along a row, over tokens, and of losses are f64 inside a call. Every sum has a fixed order, so threads do not change a bit.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::elementwise::gelu_parts;
use super::exp;

/// Elements per task.
const CHUNK: usize = 1 << 14;
/// Columns of a task that sums over tokens.
const COLUMNS: usize = 64;

/// 1 / √(mean(x²) + ε) of each row.
fn factors_of_rows(x: &[f32], width: usize, epsilon: f32) -> Vec<f64> {
    x.par_chunks(width.max(1))
        .map(|x| {
            let squares: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            1.0 / (squares / width as f64 + f64::from(epsilon)).sqrt()
        })
        .collect()
}

/// Adds the gradient of a norm's input to `dx`.
///
/// # Arguments
/// * `x`: `[tokens, hidden_size]`, the input
/// * `weight`: `[hidden_size]`
/// * `dy`: the gradient with respect to the output, shaped as `x`
/// * `dx`: shaped as `x`; a residual connection has its own gradient there
/// * `dw`: `[hidden_size]`, to which the gradient of the weight is added, if it is wanted
///
/// # Panics
/// Panics when a slice does not have the size of its shape.
pub fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    dy: &[f32],
    dx: &mut [f32],
    dw: Option<&mut [f32]>,
) {
    let width = weight.len().max(1);
    assert!(
        x.len().is_multiple_of(width) && dy.len() == x.len() && dx.len() == x.len(),
        "gradients of a norm have its shape"
    );
    let factors = factors_of_rows(x, width, epsilon);
    dx.par_chunks_mut(width)
        .zip(x.par_chunks(width))
        .zip(dy.par_chunks(width))
        .zip(&factors)
        .for_each(|(((dx, x), dy), r)| {
            let products = dy.iter().zip(weight).zip(x);
            let products = products.map(|((dy, w), x)| f64::from(dy * w) * f64::from(*x));
            let shared = (products.sum::<f64>() / width as f64 * r * r * r) as f32;
            let r = *r as f32;
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx += r * (dy * w) - x * shared;
            }
        });
    let Some(dw) = dw else {
        return;
    };
    assert_eq!(dw.len(), weight.len(), "dw must be [hidden_size]");
    dw.par_chunks_mut(COLUMNS).enumerate().for_each(|(task, dw)| {
        let mut sums = [0.0f64; COLUMNS];
        let first = task * COLUMNS;
        for ((x, dy), r) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(&factors) {
            let columns = x[first..].iter().zip(&dy[first..]);
            for (sum, (x, dy)) in sums.iter_mut().zip(columns) {
                *sum += f64::from(*dy) * f64::from(*x) * r;
            }
        }
        dw.iter_mut().zip(sums).for_each(|(dw, sum)| *dw += sum as f32);
    });
}

/// Replaces gate, up and the gradient of y = silu(gate) ∘ up, in place: `gate` by its gradient, `up` by its gradient, and `dy` by y, which
/// the gradient of the next weight needs. All `[tokens, intermediate_size]`.
///
/// # Panics
/// Panics when lengths differ.
pub fn silu_times_backward(gate: &mut [f32], up: &mut [f32], dy: &mut [f32]) {
    struct SiluTimesBackward<'a>(&'a mut [f32], &'a mut [f32], &'a mut [f32]);
    impl WithSimd for SiluTimesBackward<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            for ((gate, up), dy) in self.0.iter_mut().zip(self.1).zip(self.2) {
                let (g, u, d) = (*gate, *up, *dy);
                let sigmoid = 1.0 / (1.0 + exp::exp(-g));
                let silu = g * sigmoid;
                *gate = d * u * (sigmoid * (1.0 + g * (1.0 - sigmoid)));
                *up = d * silu;
                *dy = silu * u;
            }
        }
    }
    assert!(
        gate.len() == up.len() && gate.len() == dy.len(),
        "gate, up and their product have one shape"
    );
    gate.par_chunks_mut(CHUNK)
        .zip(up.par_chunks_mut(CHUNK))
        .zip(dy.par_chunks_mut(CHUNK))
        .for_each(|((gate, up), dy)| Arch::new().dispatch(SiluTimesBackward(gate, up, dy)));
}

/// Turns the gradient of y = c·tanh(x/c) into the gradient of x, in place: dx = dy ∘ (1 − (y/c)²).
///
/// # Panics
/// Panics when lengths differ.
pub fn soft_cap_backward(y: &[f32], cap: f32, dy: &mut [f32]) {
    assert_eq!(y.len(), dy.len(), "values and their gradients have one shape");
    dy.par_chunks_mut(CHUNK).zip(y.par_chunks(CHUNK)).for_each(|(dy, y)| {
        for (dy, y) in dy.iter_mut().zip(y) {
            *dy *= 1.0 - (y / cap) * (y / cap);
        }
    });
}

/// Replaces gate, up and the gradient of y = gelu_tanh(gate) ∘ up in place, as [`silu_times_backward`] does for SiLU.
///
/// # Panics
/// Panics when lengths differ.
pub fn gelu_tanh_times_backward(gate: &mut [f32], up: &mut [f32], dy: &mut [f32]) {
    struct GeluTimesBackward<'a>(&'a mut [f32], &'a mut [f32], &'a mut [f32]);
    impl WithSimd for GeluTimesBackward<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            for ((gate, up), dy) in self.0.iter_mut().zip(self.1).zip(self.2) {
                let (g, u, d) = (*gate, *up, *dy);
                let (exponential, product) = gelu_parts(g);
                let sigmoid = 1.0 / (1.0 + exponential);
                let gelu = g * sigmoid;
                // e⁻ᶻ·σ(z) is 1 − σ(z) without its rounding.
                *gate = d * u * (sigmoid * (1.0 + exponential * sigmoid * product));
                *up = d * gelu;
                *dy = gelu * u;
            }
        }
    }
    assert!(
        gate.len() == up.len() && gate.len() == dy.len(),
        "gate, up and their product have one shape"
    );
    gate.par_chunks_mut(CHUNK)
        .zip(up.par_chunks_mut(CHUNK))
        .zip(dy.par_chunks_mut(CHUNK))
        .for_each(|((gate, up), dy)| Arch::new().dispatch(GeluTimesBackward(gate, up, dy)));
}

/// Replaces logits by the gradients of `scale` · Σ −ln softmax(logits)\[target\]; returns the sum itself, without the factor, in nat.
///
/// # Arguments
/// * `logits`: `[tokens, vocab_size]`
/// * `targets`: `[tokens]`; a token without a target has no loss, and gradients of 0
///
/// # Panics
/// Panics when there are no logits per target, or a target is not in the vocabulary.
pub fn cross_entropy_backward(
    logits: &mut [f32],
    targets: &[Option<u32>],
    vocab_size: usize,
    scale: f32,
) -> f64 {
    struct LogitSoftmax<'a>(&'a mut [f32], f32);
    impl WithSimd for LogitSoftmax<'_> {
        /// ln Σ e^z.
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f64 {
            let Self(logits, scale) = self;
            let largest = exp::largest_of(simd, logits);
            let sum = exp::exp_minus(simd, logits, 1.0, largest);
            let factor = (f64::from(scale) / sum) as f32;
            for value in logits {
                *value *= factor;
            }
            f64::from(largest) + sum.ln()
        }
    }
    assert_eq!(logits.len(), targets.len() * vocab_size, "logits must be [tokens, vocab_size]");
    let losses: Vec<f64> = logits
        .par_chunks_mut(vocab_size.max(1))
        .zip(targets)
        .map(|(logits, target)| {
            let Some(target) = target else {
                logits.fill(0.0);
                return 0.0;
            };
            let target = *target as usize;
            let chosen = f64::from(logits[target]);
            let log_sum = Arch::new().dispatch(LogitSoftmax(logits, scale));
            logits[target] -= scale;
            log_sum - chosen
        })
        .collect();
    losses.iter().sum()
}

/// Writes the gradients of `scale` · Σ (y − target)² to `dy`; returns the sum itself, without the factor.
///
/// # Panics
/// Panics when lengths differ.
pub fn squared_error_backward(y: &[f32], target: &[f32], scale: f32, dy: &mut [f32]) -> f64 {
    assert!(
        y.len() == target.len() && y.len() == dy.len(),
        "outputs, targets and gradients have one shape"
    );
    let sums: Vec<f64> = dy
        .par_chunks_mut(CHUNK)
        .zip(y.par_chunks(CHUNK))
        .zip(target.par_chunks(CHUNK))
        .map(|((dy, y), target)| {
            let mut sum = 0.0;
            for ((dy, y), target) in dy.iter_mut().zip(y).zip(target) {
                let difference = y - target;
                *dy = 2.0 * scale * difference;
                sum += f64::from(difference) * f64::from(difference);
            }
            sum
        })
        .collect();
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::super::elementwise;
    use super::*;

    fn wave(count: usize, pace: f32) -> Vec<f32> {
        (0..count).map(|i| 2.0 * (i as f32 * pace).sin()).collect()
    }

    /// The derivative of `f` with respect to each element of `x` in f64, by central differences.
    fn differences(x: &[f32], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
        let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        (0..x.len())
            .map(|at| {
                let (before, step) = (x[at], 1e-5);
                let mut around = [-step, step].map(|step| {
                    x[at] = before + step;
                    f(&x)
                });
                x[at] = before;
                around[1] -= around[0];
                around[1] / (2.0 * step)
            })
            .collect()
    }

    fn assert_close(got: &[f32], exact: &[f64], what: &str) {
        assert_eq!(got.len(), exact.len());
        for (got, exact) in got.iter().zip(exact) {
            // Differences of f64 are exact to 1e-9; what is left is f32.
            let allowed = 2e-6 * (1.0 + exact.abs());
            assert!((f64::from(*got) - exact).abs() < allowed, "{what}: {got} {exact}");
        }
    }

    #[test]
    fn the_norm_has_the_slope_of_its_formula() {
        let (tokens, width, epsilon) = (3, 70, 0.1);
        let (x, dy) = (wave(tokens * width, 0.37), wave(tokens * width, 0.71));
        let weight = wave(width, 0.23);
        let norm = |x: &[f64], weight: &[f64]| -> f64 {
            let rows = x.chunks(width).zip(dy.chunks(width));
            rows.map(|(x, dy)| {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
                let root = (mean + f64::from(epsilon)).sqrt();
                let terms = x.iter().zip(weight).zip(dy);
                terms.map(|((x, w), dy)| x / root * w * f64::from(*dy)).sum::<f64>()
            })
            .sum()
        };
        let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|x| f64::from(*x)).collect() };
        let (mut dx, mut dw) = (vec![0.5; x.len()], vec![0.25; width]);
        rms_norm_backward(&x, &weight, epsilon, &dy, &mut dx, Some(&mut dw));
        let exact = differences(&x, |x| norm(x, &wide(&weight)));
        let exact: Vec<f64> = exact.iter().map(|slope| slope + 0.5).collect();
        assert_close(&dx, &exact, "dx");
        let exact = differences(&weight, |weight| norm(&wide(&x), weight));
        let exact: Vec<f64> = exact.iter().map(|slope| slope + 0.25).collect();
        assert_close(&dw, &exact, "dw");
    }

    #[test]
    fn silu_has_the_slope_of_its_formula_and_gives_its_value_back() {
        let count = CHUNK + 5;
        let (gate, up, dy) = (wave(count, 0.37), wave(count, 0.11), wave(count, 0.71));
        let (mut dg, mut du, mut y) = (gate.clone(), up.clone(), dy.clone());
        silu_times_backward(&mut dg, &mut du, &mut y);
        let mut value = gate.clone();
        elementwise::silu_times(&mut value, &up);
        for at in (0..count).step_by(997) {
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let (g, u, d) = (f64::from(gate[at]), f64::from(up[at]), f64::from(dy[at]));
            let slope = (silu(g + 1e-5) - silu(g - 1e-5)) / 2e-5;
            assert_close(&dg[at..=at], &[slope * u * d], "gate");
            assert_close(&du[at..=at], &[silu(g) * d], "up");
            assert_close(&y[at..=at], &[f64::from(value[at])], "value");
        }
        // Far from 0 the slope is 0 or 1, never NaN.
        let (mut gate, mut up, mut dy) = ([-200.0, 200.0], [2.0; 2], [3.0; 2]);
        silu_times_backward(&mut gate, &mut up, &mut dy);
        assert!(gate[0].abs() < 1e-6 && gate[1] == 6.0, "{gate:?}");
    }

    #[test]
    fn gelu_has_the_slope_of_its_formula_and_gives_its_value_back() {
        let count = CHUNK + 5;
        let gate: Vec<f32> = wave(count, 0.37).iter().map(|x| 4.0 * x).collect();
        let (up, dy) = (wave(count, 0.11), wave(count, 0.71));
        let (mut dg, mut du, mut y) = (gate.clone(), up.clone(), dy.clone());
        gelu_tanh_times_backward(&mut dg, &mut du, &mut y);
        let mut value = gate.clone();
        elementwise::gelu_tanh_times(&mut value, &up);
        let gelu = |x: f64| {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * x * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh())
        };
        for at in (0..count).step_by(97) {
            let (g, u, d) = (f64::from(gate[at]), f64::from(up[at]), f64::from(dy[at]));
            let slope = (gelu(g + 1e-5) - gelu(g - 1e-5)) / 2e-5;
            assert_close(&dg[at..=at], &[slope * u * d], "gate");
            assert_close(&du[at..=at], &[gelu(g) * d], "up");
            assert_close(&y[at..=at], &[f64::from(value[at])], "value");
        }
        // Far from 0 the slope is 0 or 1, never NaN.
        let mut gate = [-200.0, 200.0, -1e15, 1e30];
        gelu_tanh_times_backward(&mut gate, &mut [2.0; 4], &mut [3.0; 4]);
        assert!(gate[0].abs() < 1e-6 && gate[1] == 6.0, "{gate:?}");
        assert!(gate[2].abs() < 1e-6 && gate[3] == 6.0, "{gate:?}");
    }

    #[test]
    fn losses_have_the_slopes_of_their_formulas() {
        let (vocab, targets) = (37, [Some(3), None, Some(36)]);
        let logits = wave(3 * vocab, 0.53);
        let entropy = |z: &[f64]| -> f64 {
            let rows = z.chunks(vocab).zip(targets);
            rows.filter_map(|(z, target)| {
                let sum: f64 = z.iter().map(|z| z.exp()).sum();
                Some(sum.ln() - z[target? as usize])
            })
            .sum()
        };
        let mut gradients = logits.clone();
        let sum = cross_entropy_backward(&mut gradients, &targets, vocab, 0.5);
        let wide: Vec<f64> = logits.iter().map(|z| f64::from(*z)).collect();
        assert!((sum - entropy(&wide)).abs() < 1e-5);
        let exact = differences(&logits, |z| 0.5 * entropy(z));
        assert_close(&gradients, &exact, "logits");
        assert!(gradients[vocab..2 * vocab].iter().all(|one| *one == 0.0));

        let (y, target) = (wave(90, 0.1), wave(90, 0.2));
        let mut dy = vec![f32::NAN; 90];
        let sum = squared_error_backward(&y, &target, 0.25, &mut dy);
        let square = |y: &[f64]| -> f64 {
            let pairs = y.iter().zip(&target);
            pairs.map(|(y, t)| (y - f64::from(*t)).powi(2)).sum()
        };
        let wide: Vec<f64> = y.iter().map(|z| f64::from(*z)).collect();
        assert!((sum - square(&wide)).abs() < 1e-4);
        assert_close(&dy, &differences(&y, |y| 0.25 * square(y)), "outputs");
    }
}
