//! Products of one token with matrices from memory: dense, without zeros, and as 8-bit codes, beside a loop that only reads the dense matrix.
//!
//! ```text
//! cargo bench --bench one_token                        2048 x 8192 and 4096 x 11008, one thread and all
//! cargo bench --bench one_token -- 4096 11008 0.6 2    rows, columns, share of zeros, threads
//! cargo bench --bench one_token -- cached              a matrix in the second-level cache, one thread
//! cargo bench --bench one_token -- avx2 cached         with these instructions: portable, avx2, avx512, avx512-vnni,
//!                                                      avx512-vbmi2-bf16
//! ```
//!
//! Matrices of bf16 rotate through more than a last-level cache. Every round measures all forms in turn; the medians are printed. GB/s are
//! bytes of the form, and `x` is the speed compared with dense.

#![expect(clippy::print_stdout, reason = "a bench prints its results")]

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use prune::linalg::linear::SingleToken;
use prune::linalg::one_token::choose_instructions;
use prune::linalg::product::Kernel;
use prune::linalg::{
    CodedActivations, CompactMatrix, KeptForm, Linear, ProductContext, Products, StoredDtype,
    StoredMatrix, Weight,
};

/// Bytes of all dense matrices together: more than a last-level cache.
const TOTAL_BYTES: usize = 180 << 20;
const ROUNDS: usize = 15;

/// Half a mebibyte in bf16, which stays in a second-level cache, and the products of a measurement.
const CACHED: [usize; 2] = [256, 1024];
const REPEATS: usize = 300;

/// A form of the matrices, and how it is multiplied.
struct Form {
    name: &'static str,
    matrices: Vec<Linear>,
    context: Option<ProductContext>,
}

fn main() {
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let mut numbers: Vec<f64> = Vec::new();
    let mut is_cached = false;
    for word in &words {
        match word.parse() {
            Ok(number) => numbers.push(number),
            Err(_) if word == "cached" => is_cached = true,
            Err(_) if choose_instructions(word) => println!("instructions: {word}"),
            // The filter of another bench, or instructions that this CPU lacks.
            Err(_) => return,
        }
    }
    if let [rows, columns, zeros, threads] = numbers[..] {
        return measure([rows as usize, columns as usize], zeros, threads as usize, 1);
    }
    if is_cached {
        return [0.5, 0.6, 0.7].into_iter().for_each(|zeros| measure(CACHED, zeros, 1, REPEATS));
    }
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    for shape in [[2048, 8192], [4096, 11008]] {
        for zeros in [0.5, 0.6, 0.7] {
            for threads in [1, all] {
                measure(shape, zeros, threads, 1);
            }
        }
    }
}

/// Measures all forms.
///
/// # Arguments
/// * `repeats`: products with the same matrix in a row; from 2 on there is a single matrix
fn measure([rows, columns]: [usize; 2], zeros: f64, threads: usize, repeats: usize) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    println!("\n{rows} x {columns}, {:.0} % zeros, {threads} threads", 100.0 * zeros);
    let count = if repeats > 1 { 1 } else { (TOTAL_BYTES / (2 * rows * columns)).max(1) };
    let mut forms = forms(count, [rows, columns], zeros);
    let x: Vec<f32> = (0..columns).map(|at| (at as f32 * 0.37).sin()).collect();
    let mut out = vec![0.0; rows];
    let mut times = vec![Vec::new(); forms.len()];
    for _ in 0..ROUNDS {
        for (form, times) in forms.iter_mut().zip(&mut times) {
            let began = Instant::now();
            pool.install(|| {
                for linear in (0..repeats).flat_map(|_| &form.matrices) {
                    match &mut form.context {
                        None => drop(black_box(linear.weight().read_through())),
                        Some(context) => linear
                            .forward(&x, &mut out, SingleToken::MatrixVector, context)
                            .expect("the weight is in memory"),
                    }
                }
            });
            let products = repeats * form.matrices.len();
            times.push(began.elapsed().as_secs_f64() / products as f64);
        }
    }
    let medians: Vec<f64> = times.into_iter().map(median).collect();
    for (form, seconds) in forms.iter().zip(&medians) {
        let bytes = form.matrices[0].weight().bytes_held().0 as f64;
        println!(
            "{:<22} {:>7.0} ns/row {:>6.1} GB/s   x {:.2}",
            form.name,
            1e9 * seconds / rows as f64,
            bytes / seconds / 1e9,
            medians[1] / seconds
        );
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// All forms of `count` random matrices, the loop that only reads first, then dense.
fn forms(count: usize, [rows, columns]: [usize; 2], zeros: f64) -> Vec<Form> {
    let kept = KeptForm::Stored(StoredDtype::Bf16);
    let dense: Vec<StoredMatrix> =
        (0..count).map(|seed| random([rows, columns], zeros, seed as u64)).collect();
    let compact_of = |matrix: &StoredMatrix, form: KeptForm| {
        let compact = CompactMatrix::of(matrix, form).expect("finite weights");
        Linear::new(Weight::Compact(compact), None)
    };
    let compact = |form| -> Vec<Linear> { dense.iter().map(|of| compact_of(of, form)).collect() };
    let two_of_four = || -> Vec<Linear> {
        let matrices =
            (0..count).map(|seed| keep_two_of_four(random([rows, columns], 0.0, seed as u64)));
        matrices.map(|matrix| compact_of(&matrix, kept)).collect()
    };
    let stored = || dense.iter().map(|matrix| Linear::new(matrix.clone(), None)).collect();
    let context = |products, activations| {
        let mut context = ProductContext::new();
        (context.products, context.activations) = (products, activations);
        Some(context)
    };
    let (f32, int8) = (CodedActivations::F32, CodedActivations::Int8);
    let mut forms = vec![
        Form { name: "only read", matrices: stored(), context: None },
        Form { name: "dense", matrices: stored(), context: context(Products::F32, f32) },
        Form { name: "compact", matrices: compact(kept), context: context(Products::F32, f32) },
    ];
    if let Some(bf16) = Kernel::best_bf16().map(Products::Bf16) {
        forms.push(Form { name: "dense, bf16 x", matrices: stored(), context: context(bf16, f32) });
        let matrices = compact(kept);
        forms.push(Form { name: "compact, bf16 x", matrices, context: context(bf16, f32) });
    }
    if zeros == 0.5 {
        let products = Kernel::best_bf16().map_or(Products::F32, Products::Bf16);
        let context = context(products, f32);
        forms.push(Form { name: "compact, 2:4", matrices: two_of_four(), context });
    }
    for (name, activations) in [("int8", int8), ("int8, f32 x", f32)] {
        let matrices = compact(KeptForm::Codes);
        forms.push(Form { name, matrices, context: context(Products::F32, activations) });
    }
    forms
}

/// A matrix of bf16 with random weights between -0.5 and 0.5.
fn random([rows, columns]: [usize; 2], zeros: f64, seed: u64) -> StoredMatrix {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut matrix =
        StoredMatrix::zeros(StoredDtype::Bf16, rows, columns).expect("memory for a matrix");
    for element in matrix.as_bytes_mut().as_chunks_mut::<2>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if (state >> 40) as f64 / f64::from(1u32 << 24) >= zeros {
            let weight = (state & 0xffff) as f32 / 65536.0 - 0.5;
            *element = bf16::from_f32(weight).to_le_bytes();
        }
    }
    matrix
}

/// Zeros two of four weights: the first and the last of each group, or the two between them, in turn.
fn keep_two_of_four(mut matrix: StoredMatrix) -> StoredMatrix {
    for (group, weights) in matrix.as_bytes_mut().as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let zeroed = if group % 3 == 0 { [0, 3] } else { [1, 2] };
        zeroed.into_iter().for_each(|at| weights[2 * at..2 * at + 2].fill(0));
    }
    matrix
}
