//! Every kernel against the plain triple loop over the same numbers, rounded where the kernel rounds.

use half::{bf16, f16};

use super::tiles::{rounded, take_part};
use super::*;

mod precision;
mod turned;

/// Reproducible numbers in (-1, 1).
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn stored(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

/// C = X·Wᵀ in f64, X rounded as the kernel does, and Σ|x·w|, which bounds the rounding of sums.
fn oracle(kernel: Kernel, x: &[f32], weight: &[bf16], inner: usize) -> Vec<(f64, f64)> {
    let taken = |x: f32| {
        if kernel.is_bf16() { bf16::from_f32(x).to_f32() } else { x }
    };
    let mut sums = Vec::new();
    for x in x.chunks_exact(inner) {
        for w in weight.chunks_exact(inner) {
            let products =
                x.iter().zip(w).map(|(&x, w)| f64::from(taken(x)) * f64::from(w.to_f32()));
            sums.push(
                products
                    .fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs())),
            );
        }
    }
    sums
}

/// A product.
fn product(
    kernel: Kernel,
    x: &[f32],
    weight: Factor<'_>,
    (columns, inner): (usize, usize),
    (out, stride): (&mut [f32], usize),
    packed: &mut Packed,
) {
    let mut jobs = [ProductJob { weight, columns, out, stride, adds: false }];
    products(kernel, x, inner, &mut jobs, packed);
}

/// A product into contiguous rows.
fn multiply(
    kernel: Kernel,
    x: &[f32],
    weight: &[bf16],
    inner: usize,
    out: &mut [f32],
    packed: &mut Packed,
) {
    let columns = weight.len() / inner;
    let weight = Factor::Stored(Values::Bf16(weight));
    product(kernel, x, weight, (columns, inner), (out, columns), packed);
}

#[test]
fn products_of_any_shape_are_those_of_the_triple_loop() {
    let shapes = [
        (1, 1, 1),
        (1, 31, 5),
        (3, 32, 16),
        (16, 33, 17),
        (17, 64, 31),
        (32, 100, 32),
        (33, 2048, 48),
        (40, 2049, 49),
        (129, 96, 100),
        (300, 4100, 130),
        (2100, 40, 300),
        (1, 600, 700),
    ];
    for kernel in Kernel::all() {
        let mut packed = Packed::default();
        for (tokens, inner, columns) in shapes {
            let (x, weight) = (numbers(tokens * inner, 1), stored(&numbers(columns * inner, 2)));
            // The old content must not show.
            let mut out = vec![f32::NAN; tokens * columns];
            multiply(kernel, &x, &weight, inner, &mut out, &mut packed);
            for (at, (found, (sum, size))) in
                out.iter().zip(oracle(kernel, &x, &weight, inner)).enumerate()
            {
                let allowed = size * f64::from(f32::EPSILON) * 16.0 + 1e-30;
                assert!(
                    (f64::from(*found) - sum).abs() <= allowed,
                    "{kernel:?} {tokens} {inner} {columns} at {at}: {found} {sum}"
                );
            }
        }
    }
}

#[test]
fn small_integers_are_exact_also_over_many_slabs() {
    let (tokens, inner, columns) = (5, 1 << 15, 200);
    let x: Vec<f32> = (0..tokens * inner).map(|at| ((at * 7) % 3) as f32 - 1.0).collect();
    let weight: Vec<bf16> = (0..columns * inner)
        .map(|at| {
            bf16::from_f32(if at % inner % 64 == 0 { ((at * 5) % 7) as f32 - 3.0 } else { 0.0 })
        })
        .collect();
    for kernel in Kernel::all() {
        let mut out = vec![f32::NAN; tokens * columns];
        multiply(kernel, &x, &weight, inner, &mut out, &mut Packed::default());
        for (found, (sum, _)) in out.iter().zip(oracle(kernel, &x, &weight, inner)) {
            assert_eq!(f64::from(*found), sum, "{kernel:?}");
        }
    }
}

#[test]
fn weights_of_any_dtype_are_widened_exactly() {
    let (tokens, inner, columns) = (21, 530, 61);
    let x = numbers(tokens * inner, 1);
    let values: Vec<f32> =
        numbers(columns * inner, 2).iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
    let halves: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
    let widened: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
    let brains = stored(&values);
    let run = |weight| {
        let mut out = vec![0.0; tokens * columns];
        let size = (columns, inner);
        let factor = Factor::Stored(weight);
        let target = (&mut out[..], columns);
        product(Kernel::Fused, &x, factor, size, target, &mut Packed::default());
        out
    };
    assert_eq!(run(Values::F32(&values)), run(Values::Bf16(&brains)));
    assert_eq!(run(Values::F32(&widened)), run(Values::F16(&halves)));
}

#[test]
fn products_made_together_have_the_bits_of_each_alone() {
    let (tokens, inner) = (70, 1500);
    let x = numbers(tokens * inner, 11);
    let columns = [100, 33, 257];
    let weights = columns.map(|columns| stored(&numbers(columns * inner, columns as u64)));
    for kernel in Kernel::all() {
        let alone: Vec<Vec<f32>> = weights
            .iter()
            .map(|weight| {
                let mut out = vec![0.0; tokens * (weight.len() / inner)];
                multiply(kernel, &x, weight, inner, &mut out, &mut Packed::default());
                out
            })
            .collect();
        let mut together = columns.map(|columns| vec![f32::NAN; tokens * columns]);
        let mut jobs: Vec<ProductJob<'_>> = together
            .iter_mut()
            .zip(&weights)
            .zip(columns)
            .map(|((out, weight), columns)| ProductJob {
                weight: Factor::Stored(Values::Bf16(weight)),
                columns,
                out,
                stride: columns,
                adds: false,
            })
            .collect();
        products(kernel, &x, inner, &mut jobs, &mut Packed::default());
        assert!(together.iter().eq(alone.iter()), "{kernel:?}");
    }
}

#[test]
fn subnormal_numbers_are_kept_by_fused_and_may_be_zero_in_bf16() {
    let (inner, tiny) = (40, 1e-40);
    let (x, weight) = (vec![tiny; inner], vec![bf16::ONE; inner]);
    for kernel in Kernel::all() {
        let mut out = [f32::NAN];
        multiply(kernel, &x, &weight, inner, &mut out, &mut Packed::default());
        let kept = inner as f32 * tiny;
        let is_kept = (out[0] - kept).abs() < 0.01 * kept;
        assert!(is_kept || kernel != Kernel::Fused && out[0] == 0.0, "{kernel:?}: {}", out[0]);
    }
}

#[test]
fn neither_threads_nor_tokens_change_a_bit() {
    let (tokens, inner, columns) = (150, 2100, 70);
    let (x, weight) = (numbers(tokens * inner, 3), stored(&numbers(columns * inner, 4)));
    for kernel in Kernel::all() {
        let run = |threads: usize, x: &[f32]| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; x.len() / inner * columns];
            pool.install(|| multiply(kernel, x, &weight, inner, &mut out, &mut Packed::default()));
            out
        };
        let whole = run(1, &x);
        assert!(whole == run(3, &x), "{kernel:?}");
        assert!(whole[..7 * columns] == run(2, &x[..7 * inner]), "{kernel:?}");
    }
}

#[test]
fn infinities_and_nans_stay_visible_in_their_rows() {
    let (inner, columns) = (70, 40);
    let mut x = numbers(3 * inner, 5);
    (x[inner + 69], x[2 * inner]) = (f32::NAN, f32::INFINITY);
    let weight = vec![bf16::ONE; columns * inner];
    for kernel in Kernel::all() {
        let mut out = vec![0.0; 3 * columns];
        multiply(kernel, &x, &weight, inner, &mut out, &mut Packed::default());
        assert!(out[..columns].iter().all(|value| value.is_finite()), "{kernel:?}");
        assert!(out[columns..2 * columns].iter().all(|value| value.is_nan()), "{kernel:?}");
        // An infinity is multiplied by missing parts of a weight, which are 0.
        let has_more_parts = matches!(kernel, Kernel::Split(2..));
        assert!(
            out[2 * columns..]
                .iter()
                .all(|value| *value == f32::INFINITY || has_more_parts && value.is_nan()),
            "{kernel:?}"
        );
    }
}

/// Products in sequence, of a single weight and of several: the planned bytes are the most that remain.
#[test]
fn packed_bytes_are_those_of_the_footprint() {
    type Case = (usize, usize, usize, &'static [usize]);
    let cases: [&[Case]; 5] = [
        &[(1, 50, 100, &[70])],
        &[(3, 2100, 600, &[700])],
        &[(2, 300, 2100, &[500])],
        // Each product alone is cut into wider tasks than all together.
        &[(8, 1024, 64, &[2048, 512, 512])],
        // Few wide tasks, then many narrow tasks.
        &[(4, 70, 600, &[96]), (4, 700, 40, &[300, 300])],
    ];
    for kernel in Kernel::all() {
        for products_of in cases {
            let threads = products_of[0].0;
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut packed = Packed::default();
            let mut sizes = Vec::new();
            for &(_, tokens, inner, columns) in products_of {
                let x = numbers(tokens * inner, 1);
                let weights: Vec<_> =
                    columns.iter().map(|columns| stored(&numbers(columns * inner, 2))).collect();
                let mut outs: Vec<_> =
                    columns.iter().map(|some| vec![0.0; tokens * some]).collect();
                let mut jobs: Vec<ProductJob<'_>> = outs
                    .iter_mut()
                    .zip(&weights)
                    .zip(columns)
                    .map(|((out, weight), &columns)| ProductJob {
                        weight: Factor::Stored(Values::Bf16(weight)),
                        columns,
                        out,
                        stride: columns,
                        adds: false,
                    })
                    .collect();
                pool.install(|| products(kernel, &x, inner, &mut jobs, &mut packed));
                sizes.push(Product {
                    kernel,
                    tokens,
                    columns: columns.to_vec(),
                    inner,
                    is_kept: false,
                    is_in_parts: false,
                });
            }
            let predicted = packed_bytes(&sizes, threads);
            let bytes = packed.bytes();
            assert!(
                bytes <= predicted && (threads > 1 || bytes == predicted),
                "{kernel:?} {products_of:?}: {bytes} {predicted}"
            );
        }
    }
}

#[test]
fn a_product_in_parts_is_the_product_in_the_memory_of_the_footprint() {
    let (tokens, inner, columns) = (2100, 70, 300);
    let (x, weight) = (numbers(tokens * inner, 1), numbers(columns * inner, 2));
    for kernel in Kernel::all() {
        let factor = Strided::rows(Values::F32(&weight), inner);
        let mut out = vec![0.0; tokens * columns];
        let mut job = [ProductJob {
            weight: Factor::Strided(factor),
            columns,
            out: &mut out,
            stride: columns,
            adds: false,
        }];
        products(kernel, &x, inner, &mut job, &mut Packed::default());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1);
        let mut packed = Packed::default();
        let parts = pool.build().unwrap().install(|| {
            let x = Strided::rows(Values::F32(&x), inner);
            let factors = StridedFactors { x, weight: factor, tokens, columns, inner };
            product_in_parts(kernel, factors, &mut packed, |area, c| (area, c.to_vec()))
        });
        let [row_parts, column_parts] = parts_of_product(kernel, tokens, columns);
        assert!(parts.len() == row_parts * column_parts && row_parts > 1);
        let mut covered = 0;
        for ([rows, part_columns], c) in parts {
            covered += c.len();
            for (row, c) in rows.zip(c.chunks_exact(part_columns.len())) {
                let exact = &out[row * columns..][part_columns.clone()];
                assert_eq!(c, exact, "{kernel:?}");
            }
        }
        assert_eq!(covered, out.len());
        let sizes = Product {
            kernel,
            tokens,
            columns: vec![columns],
            inner,
            is_kept: false,
            is_in_parts: true,
        };
        assert_eq!(packed.bytes(), packed_bytes(&[sizes], 1), "{kernel:?}");
    }
}

#[test]
fn rows_may_be_apart_and_the_elements_between_them_are_kept() {
    let (tokens, inner, columns, stride) = (35, 64, 20, 33);
    let (x, weight) = (numbers(tokens * inner, 7), stored(&numbers(columns * inner, 8)));
    for kernel in Kernel::all() {
        let mut packed = Packed::default();
        let mut close = vec![0.0; tokens * columns];
        multiply(kernel, &x, &weight, inner, &mut close, &mut packed);
        let mut apart = vec![7.0; (tokens - 1) * stride + columns];
        let factor = Factor::Stored(Values::Bf16(&weight));
        let target = (&mut apart[..], stride);
        product(kernel, &x, factor, (columns, inner), target, &mut packed);
        for (row, close) in close.chunks_exact(columns).enumerate() {
            assert_eq!(&apart[row * stride..][..columns], close, "{kernel:?}");
        }
        let between = apart.chunks(stride).flat_map(|row| row.iter().skip(columns));
        assert!(between.copied().all(|value| value == 7.0));
    }
}

#[test]
fn a_weight_packed_once_gives_the_bits_of_one_packed_each_time() {
    let (tokens, inner, columns) = (37, 2300, 150);
    let (x, weight) = (numbers(tokens * inner, 9), stored(&numbers(columns * inner, 10)));
    for kernel in Kernel::all().into_iter().filter(|kernel| kernel.keeps()) {
        let kept = PackedWeight::of(kernel, Values::Bf16(&weight), columns, inner);
        assert_eq!(
            kept.lines.len() * size_of::<Line>(),
            PackedWeight::bytes(kernel, columns, inner)
        );
        for (first, some) in [(0, columns), (32, 64), (64, 70), (96, 54), (128, 22)] {
            let (mut each, mut once) = (vec![0.0; tokens * some], vec![0.0; tokens * some]);
            let rows = &weight[first * inner..(first + some) * inner];
            multiply(kernel, &x, rows, inner, &mut each, &mut Packed::default());
            let factor = Factor::Packed(&kept, first);
            let target = (&mut once[..], some);
            let mut packed = Packed::default();
            product(kernel, &x, factor, (some, inner), target, &mut packed);
            assert!(each == once, "{kernel:?} {first} {some}");
        }
    }
}

/// The message a product of these factors panics with.
fn panic_of(factors: Factors<'_>, out: &mut [f32], stride: usize, kernel: Kernel) -> String {
    let run = std::panic::AssertUnwindSafe(|| kernel.multiply(factors, out, stride, false));
    let payload = std::panic::catch_unwind(run).expect_err("the product is refused");
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => payload.downcast::<&str>().expect("a message").to_string(),
    }
}

#[test]
fn shapes_and_strides_that_overflow_are_refused_with_a_message() {
    for kernel in Kernel::all() {
        let (x, w) = (
            vec![Line::default(); kernel.row_lines(5, 32)],
            vec![Line::default(); kernel.column_lines(1, 32)],
        );
        let factors = |rows, columns, inner| Factors { x: &x, w: &w, rows, columns, inner };
        let out = &mut [0.0; 64][..];
        // 4 · 2⁶² and 2 · 2⁶³ are 0 in 64 bits.
        for (rows, stride) in [(5, 1 << 62), (3, 1 << 63), (2, usize::MAX)] {
            let message = panic_of(factors(rows, 1, 32), out, stride, kernel);
            assert_eq!(
                message, "the result reaches beyond its slice",
                "{kernel:?} {rows} {stride}"
            );
        }
        // No slice is as long as these factors.
        for inner in [1 << 58, 1 << 62, usize::MAX] {
            let message = panic_of(factors(1, 1, inner), out, 1, kernel);
            assert!(!message.is_empty(), "{kernel:?} {inner}");
        }
    }
}
