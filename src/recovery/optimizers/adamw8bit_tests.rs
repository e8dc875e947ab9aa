//! The 8-bit optimizer against a model of bitsandbytes' CUDA kernel, and its safeguards.

use super::adamw::AdamW;
use super::adamw8bit::{AdamW8bit, BLOCK};
use super::{Hyperparameters, KeptMask, Optimizer, TrainingStep};
use crate::linalg::dynamic_map::DynamicMap;
use crate::linalg::golden_tests::{golden_f32, golden_tensor};

const FILE: &str = "adamw8bit.cuda-model.safetensors";

fn settings(safeguards: bool) -> Hyperparameters {
    Hyperparameters { weight_decay: 0.01, safeguards, ..Hyperparameters::default() }
}

/// The rule of the reference's vectors: a 32-bit integer mixer, uniform in ±0.5, times 2^-(i mod spread); every fifth is +0.
fn gradient(count: usize, step: u64, spread: u64) -> Vec<f32> {
    let value = |i: u64| {
        if i.is_multiple_of(5) {
            return 0.0;
        }
        let seeded = i * 2_654_435_761 + step * 40_503 + 12_345;
        let mut x = seeded as u32;
        x ^= x >> 15;
        x = x.wrapping_mul(2_246_822_519);
        x ^= x >> 13;
        x = x.wrapping_mul(3_266_489_917);
        x ^= x >> 16;
        ((f64::from(x) / 2f64.powi(32) - 0.5) * 0.5f64.powi((i % spread) as i32)) as f32
    };
    (0..count as u64).map(value).collect()
}

fn start(count: usize) -> Vec<f32> {
    gradient(count, 1000, 4).iter().map(|value| value * 4.0).collect()
}

fn step(number: u64) -> TrainingStep {
    TrainingStep { number, rate: 1e-3 }
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
    squares.sum::<f64>().sqrt()
}

#[test]
fn gradients_are_those_of_the_vectors() {
    for (label, count, spread) in [("8192", 8192, 4), ("5000", 5000, 4), ("wide", 8192, 12)] {
        let file = "adamw8bit.cpu.safetensors";
        let Some(expected) = golden_f32(file, &format!("{label}.gradient.1")) else {
            return;
        };
        assert_eq!(gradient(count, 1, spread), expected);
        assert_eq!(start(count), golden_f32(file, &format!("{label}.parameter.0")).unwrap());
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the measurement decides on the tolerance")]
fn without_safeguards_it_is_the_cuda_kernel() {
    for (label, count, spread) in [("8192", 8192, 4), ("5000", 5000, 4), ("wide", 8192, 12)] {
        let optimizer = AdamW8bit::new(settings(false));
        let mut parameter = start(count);
        let mut state = vec![0; optimizer.state_bytes(count)];
        for number in 1..=50 {
            let gradient = gradient(count, number, spread);
            optimizer.update(step(number), &mut parameter, &gradient, None, &mut state);
            if ![1, 2, 3, 10, 50].contains(&number) {
                continue;
            }
            let key = |part: &str| format!("{label}.{part}.{number}");
            let Some((_, codes)) = golden_tensor(FILE, &key("state1")) else {
                return;
            };
            // Moments depend on gradients alone, so no difference of a parameter reaches them.
            let codes = [codes, golden_tensor(FILE, &key("state2")).unwrap().1].concat();
            let other = |(found, expected): &(&u8, &u8)| found != expected;
            let others = state.iter().zip(&codes).filter(other).count();
            assert_eq!(others, 0, "codes of {label} after {number}");
            let scales =
                [key("absmax1"), key("absmax2")].map(|key| golden_f32(FILE, &key).unwrap());
            let found = state[2 * count..].as_chunks::<4>().0.iter();
            let found: Vec<f32> = found.map(|&bytes| f32::from_le_bytes(bytes)).collect();
            assert_eq!(found, scales.concat(), "scales of {label} after {number}");
            let expected = golden_f32(FILE, &key("parameter")).unwrap();
            let off = distance(&parameter, &expected) / distance(&start(count), &expected);
            println!("{label} after {number}: {off:e} of the way moved");
            assert!(off <= 1e-6, "{label} {number}: {off:e}");
        }
    }
}

/// The distance from f32 AdamW after 50 steps, as a share of the way moved; and the largest difference of a parameter.
fn against_f32(safeguards: bool, spread: u64) -> (f64, f32) {
    let count = 8192;
    let (coded, plain) = (AdamW8bit::new(settings(safeguards)), AdamW::new(settings(true)));
    let (mut found, mut exact) = (start(count), start(count));
    let mut state = vec![0; coded.state_bytes(count)];
    let mut plain_state = vec![0; plain.state_bytes(count)];
    for number in 1..=50 {
        let gradient = gradient(count, number, spread);
        coded.update(step(number), &mut found, &gradient, None, &mut state);
        plain.update(step(number), &mut exact, &gradient, None, &mut plain_state);
    }
    let worst = found.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (distance(&found, &exact) / distance(&start(count), &exact), worst)
}

#[test]
#[expect(clippy::print_stdout, reason = "the measurement decides on the tolerance")]
fn with_safeguards_gradients_over_many_octaves_do_not_diverge() {
    let (kernel, worst) = against_f32(false, 12);
    assert!(kernel > 5.0 && worst > 1.0, "the kernel diverges: {kernel} {worst}");
    let (guarded, worst) = against_f32(true, 12);
    println!(
        "wide: {guarded} {worst}; narrow: {:?} {:?}",
        against_f32(true, 4),
        against_f32(false, 4)
    );
    assert!(guarded < 0.25, "{guarded}");
    assert!(worst < 0.05, "{worst}");
    // Far beyond the reach of the codes.
    let (guarded, worst) = against_f32(true, 24);
    assert!(guarded < 1.0 && worst < 0.06, "{guarded} {worst}");
    // Nothing changes where no moment is rounded to 0.
    assert!(against_f32(true, 4).0 < 0.04);
}

#[test]
fn no_pruned_weight_moves() {
    let count = 4096;
    let pruned = |at: usize| at % 5 >= 2;
    let trained = |safeguards, mask: Option<&KeptMask>, sign: f32| {
        let optimizer = AdamW8bit::new(settings(safeguards));
        let mut parameter = start(count);
        (0..count).filter(|&at| pruned(at)).for_each(|at| parameter[at] = 0.0);
        let mut state = vec![0; optimizer.state_bytes(count)];
        for number in 1..=50 {
            let mut gradient = gradient(count, number, 4);
            if mask.is_none() {
                // The product with a mask: -0 where the gradient is negative.
                let zeros = (0..count).filter(|&at| pruned(at));
                zeros.for_each(|at| gradient[at] *= 0.0 * sign);
            }
            optimizer.update(step(number), &mut parameter, &gradient, mask, &mut state);
        }
        let moved = (0..count).filter(|&at| pruned(at) && parameter[at].to_bits() != 0);
        (moved.count(), state)
    };
    // The README of the vectors counted 1227 of 2457 in the kernel.
    assert_eq!(trained(false, None, 1.0).0, 1227);
    assert_eq!(trained(true, None, 1.0).0, 0);

    let mut mask_values = vec![1.0; count];
    (0..count).filter(|&at| pruned(at)).for_each(|at| mask_values[at] = 0.0);
    let mask = KeptMask::of_nonzero(&mask_values);
    for safeguards in [false, true] {
        let (moved, state) = trained(safeguards, Some(&mask), 1.0);
        assert_eq!(moved, 0);
        for at in (0..count).filter(|&at| pruned(at)) {
            let [m, v] = [state[at], state[count + at]].map(usize::from);
            assert_eq!(DynamicMap::signed().values()[m], 0.0);
            assert_eq!(DynamicMap::unsigned().values()[v], 0.0);
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing_but_its_own_moments() {
    for count in [1000, 4096] {
        let optimizer = AdamW8bit::new(settings(true));
        let mut parameter = start(count);
        let mut state = vec![0; optimizer.state_bytes(count)];
        let mut values = gradient(count, 1, 4);
        optimizer.update(step(1), &mut parameter, &values, None, &mut state);
        let before = parameter.clone();
        values = gradient(count, 2, 4);
        (values[3], values[BLOCK + 1]) = (f32::NAN, f32::NEG_INFINITY);
        optimizer.update(step(2), &mut parameter, &values, None, &mut state);
        for at in [3, BLOCK + 1] {
            assert_eq!(parameter[at], before[at]);
        }
        assert!(parameter.iter().all(|value| value.is_finite()));
        assert_ne!(parameter[4], before[4]);
        // The third step of that element is as if its moments began.
        let third = gradient(count, 3, 4);
        optimizer.update(step(3), &mut parameter, &third, None, &mut state);
        assert!(parameter.iter().all(|value| value.is_finite()));
    }
}

#[test]
fn small_parameters_have_f32_states_and_follow_adamw() {
    let count = 4095;
    let (coded, plain) = (AdamW8bit::new(settings(true)), AdamW::new(settings(true)));
    let (mut found, mut exact) = (start(count), start(count));
    let mut state = vec![0; coded.state_bytes(count)];
    let mut plain_state = state.clone();
    for number in 1..=50 {
        let gradient = gradient(count, number, 12);
        coded.update(step(number), &mut found, &gradient, None, &mut state);
        plain.update(step(number), &mut exact, &gradient, None, &mut plain_state);
    }
    // Only the place of the decay differs: rate · decay · a step of the rate, 50 times.
    assert!(distance(&found, &exact) / distance(&start(count), &exact) < 1e-4);
}
