//! Every kernel against the plain triple loop over the same numbers, rounded where the kernel rounds.

use half::{bf16, f16};

use super::tiles::{rounded, take_part};
use super::*;

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
        if kernel.is_bf16() {
            bf16::from_f32(x).to_f32()
        } else {
            x
        }
    };
    let mut sums = Vec::new();
    for x in x.chunks_exact(inner) {
        for w in weight.chunks_exact(inner) {
            let products = x
                .iter()
                .zip(w)
                .map(|(&x, w)| f64::from(taken(x)) * f64::from(w.to_f32()));
            sums.push(products.fold((0.0, 0.0), |(sum, size), product| {
                (sum + product, size + product.abs())
            }));
        }
    }
    sums
}

/// One product.
fn product(
    kernel: Kernel,
    x: &[f32],
    weight: Factor<'_>,
    (columns, inner): (usize, usize),
    (out, stride): (&mut [f32], usize),
    packed: &mut Packed,
) {
    let mut jobs = [Job {
        weight,
        columns,
        out,
        stride,
    }];
    products(kernel, x, inner, &mut jobs, packed);
}

/// A product into rows that lie closely.
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
            let (x, weight) = (
                numbers(tokens * inner, 1),
                stored(&numbers(columns * inner, 2)),
            );
            // What was there before must not shine through.
            let mut out = vec![f32::NAN; tokens * columns];
            multiply(kernel, &x, &weight, inner, &mut out, &mut packed);
            for (at, (found, (sum, size))) in out
                .iter()
                .zip(oracle(kernel, &x, &weight, inner))
                .enumerate()
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
    let x: Vec<f32> = (0..tokens * inner)
        .map(|at| ((at * 7) % 3) as f32 - 1.0)
        .collect();
    let weight: Vec<bf16> = (0..columns * inner)
        .map(|at| {
            bf16::from_f32(if at % inner % 64 == 0 {
                ((at * 5) % 7) as f32 - 3.0
            } else {
                0.0
            })
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
    let values: Vec<f32> = numbers(columns * inner, 2)
        .iter()
        .map(|&value| bf16::from_f32(value).to_f32())
        .collect();
    let halves: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
    let widened: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
    let brains = stored(&values);
    let run = |weight| {
        let mut out = vec![0.0; tokens * columns];
        let size = (columns, inner);
        let factor = Factor::Stored(weight);
        let target = (&mut out[..], columns);
        product(
            Kernel::Fused,
            &x,
            factor,
            size,
            target,
            &mut Packed::default(),
        );
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
        let mut jobs: Vec<Job<'_>> = together
            .iter_mut()
            .zip(&weights)
            .zip(columns)
            .map(|((out, weight), columns)| Job {
                weight: Factor::Stored(Values::Bf16(weight)),
                columns,
                out,
                stride: columns,
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
        assert!(
            is_kept || kernel != Kernel::Fused && out[0] == 0.0,
            "{kernel:?}: {}",
            out[0]
        );
    }
}

#[test]
fn neither_threads_nor_tokens_change_a_bit() {
    let (tokens, inner, columns) = (150, 2100, 70);
    let (x, weight) = (
        numbers(tokens * inner, 3),
        stored(&numbers(columns * inner, 4)),
    );
    for kernel in Kernel::all() {
        let run = |threads: usize, x: &[f32]| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let mut out = vec![0.0; x.len() / inner * columns];
            pool.install(|| multiply(kernel, x, &weight, inner, &mut out, &mut Packed::default()));
            out
        };
        let whole = run(1, &x);
        assert!(whole == run(3, &x), "{kernel:?}");
        assert!(
            whole[..7 * columns] == run(2, &x[..7 * inner]),
            "{kernel:?}"
        );
    }
}

#[test]
fn what_is_not_finite_stays_visible_and_stays_where_it_is() {
    let (inner, columns) = (70, 40);
    let mut x = numbers(3 * inner, 5);
    (x[inner + 69], x[2 * inner]) = (f32::NAN, f32::INFINITY);
    let weight = vec![bf16::ONE; columns * inner];
    for kernel in Kernel::all() {
        let mut out = vec![0.0; 3 * columns];
        multiply(kernel, &x, &weight, inner, &mut out, &mut Packed::default());
        assert!(
            out[..columns].iter().all(|value| value.is_finite()),
            "{kernel:?}"
        );
        assert!(
            out[columns..2 * columns].iter().all(|value| value.is_nan()),
            "{kernel:?}"
        );
        // What is infinite meets the parts that a weight has not, which are 0.
        let has_more_parts = matches!(kernel, Kernel::Split(2..));
        assert!(
            out[2 * columns..]
                .iter()
                .all(|value| *value == f32::INFINITY || has_more_parts && value.is_nan()),
            "{kernel:?}"
        );
    }
}

/// How far a kernel is from the exact product of weights in a dtype: the root of the mean square, and the most, relative to Σ|x·w|.
fn error_of(
    kernel: Kernel,
    weight: Values<'_>,
    wide: &[f32],
    x: &[f32],
    inner: usize,
) -> (f64, f64) {
    let columns = wide.len() / inner;
    let mut out = vec![f32::NAN; x.len() / inner * columns];
    let factor = Factor::Stored(weight);
    let target = (&mut out[..], columns);
    let mut packed = Packed::default();
    product(kernel, x, factor, (columns, inner), target, &mut packed);
    let (mut squares, mut most) = (0.0, 0.0f64);
    for (x, out) in x.chunks_exact(inner).zip(out.chunks_exact(columns)) {
        for (w, found) in wide.chunks_exact(inner).zip(out) {
            let products = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), product| {
                (sum + product, size + product.abs())
            });
            let error = (f64::from(*found) - sum) / size;
            squares += error * error;
            most = most.max(error.abs());
        }
    }
    ((squares / out.len() as f64).sqrt(), most)
}

#[test]
fn products_by_parts_are_as_exact_as_those_of_f32() {
    let (tokens, inner, columns) = (40, 4096, 50);
    // Every bit of the significand is used, and sizes differ as those of activations do.
    let x: Vec<f32> = numbers(tokens * inner, 21)
        .iter()
        .enumerate()
        .map(|(at, value)| value * 10.0f32.powi((at * 31 % 7) as i32 - 3))
        .collect();
    let values = numbers(columns * inner, 22);
    let halves: Vec<f16> = values
        .iter()
        .map(|&value| f16::from_f32(value * 0.03))
        .collect();
    let brains = stored(&values);
    let widened: Vec<f32> = halves.iter().map(|value| value.to_f32()).collect();
    let widest: Vec<f32> = brains.iter().map(|value| value.to_f32()).collect();
    for (dtype, weight, wide) in [
        (StoredDtype::Bf16, Values::Bf16(&brains), &widest),
        (StoredDtype::F16, Values::F16(&halves), &widened),
        (StoredDtype::F32, Values::F32(&values), &values),
    ]
    .into_iter()
    .filter(|_| Kernel::has_split())
    {
        let by_parts = error_of(Kernel::split(dtype), weight, wide, &x, inner);
        let fused = error_of(Kernel::Fused, weight, wide, &x, inner);
        assert!(by_parts.0 <= fused.0, "{dtype:?}: {by_parts:?} {fused:?}");
        assert!(
            by_parts.1 <= 1.5 * fused.1,
            "{dtype:?}: {by_parts:?} {fused:?}"
        );
        // One part fewer would not do.
        if let Kernel::Split(parts @ 2..) = Kernel::split(dtype) {
            let fewer = error_of(Kernel::Split(parts - 1), weight, wide, &x, inner);
            assert!(
                fewer.0 > 3.0 * by_parts.0,
                "{dtype:?}: {fewer:?} {by_parts:?}"
            );
        }
    }
}

#[test]
fn the_parts_of_a_number_are_the_number() {
    let odd = [
        0.0,
        -0.0,
        1.0,
        -1.0 - f32::EPSILON,
        std::f32::consts::PI,
        f32::MAX,
        f32::MIN,
        3.4e38,
        1e-30,
        -7.7e-33,
    ];
    for value in odd.into_iter().chain(numbers(1000, 23)) {
        let mut rest = value;
        let parts: [u16; 3] = std::array::from_fn(|_| take_part::<3>(&mut rest));
        let sum: f64 = parts
            .iter()
            .map(|&part| bf16::from_bits(part).to_f64())
            .sum();
        assert_eq!((sum, rest), (f64::from(value), 0.0), "{value:e}");
    }
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut rest = value;
        let first = bf16::from_bits(take_part::<3>(&mut rest)).to_f32();
        assert!(first == value || first.is_nan() && value.is_nan());
        assert_eq!((take_part::<3>(&mut rest), rest), (0, 0.0));
    }
}

#[test]
fn rounding_is_that_of_the_half_crate() {
    let odd = [
        0.0,
        -0.0,
        1.0,
        1.003_906_3,
        1.011_718_8,
        3.4e38,
        f32::MAX,
        f32::INFINITY,
        f32::MIN_POSITIVE,
        1e-45,
        -2.5,
    ];
    for value in odd.into_iter().chain(numbers(1000, 6)) {
        assert_eq!(rounded(value), bf16::from_f32(value).to_bits(), "{value}");
    }
    for nan in [
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffff_ffff),
    ] {
        assert!(bf16::from_bits(rounded(nan)).is_nan());
    }
}

/// However rows are packed on this CPU, a line has the bits of [`take_part`]; for a subnormal number it may have zero.
fn parts_are_taken_one_by_one<const PARTS: usize>() {
    // Whole steps and the beginning of one more; more rows than a tile, fewer than a block.
    let (rows, inner) = (19, 3 * 32 + 5);
    let mut values = numbers(rows * inner, 11);
    let odd = [
        0.0,
        -0.0,
        3.4e38,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-45,
        f32::MIN_POSITIVE,
        1e-38,
        -1.5e-36,
        65504.0,
    ];
    // One to a line, and all in one.
    for (at, odd) in odd.into_iter().enumerate() {
        values[at * inner + 7 * at % 96] = odd;
        values[(rows - 1) * inner + 32 + at] = odd;
    }
    let steps = inner.div_ceil(32);
    let mut lines = vec![Line([7; 32]); 2 * steps * PARTS * 16];
    let strided = Strided::rows(Values::F32(&values), inner);
    super::tiles::pack_rows::<PARTS>(strided, rows, inner, &mut lines);
    for row in 0..32 {
        for at in 0..steps * 32 {
            let is_there = row < rows && at < inner;
            let value = if is_there {
                values[row * inner + at]
            } else {
                0.0
            };
            let mut rest = value;
            for part in 0..PARTS {
                let wanted = bf16::from_bits(take_part::<PARTS>(&mut rest));
                let line = ((row / 16 * steps + at / 32) * PARTS + part) * 16 + row % 16;
                let got = bf16::from_bits(lines[line].0[at % 32]);
                let is_same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                let is_tiny = got == bf16::ZERO && wanted.to_f32().abs() <= f32::MIN_POSITIVE;
                assert!(is_same || is_tiny, "{value}, part {part}: {got} {wanted}");
            }
        }
    }
}

#[test]
fn rows_are_packed_as_one_by_one() {
    parts_are_taken_one_by_one::<1>();
    parts_are_taken_one_by_one::<3>();
}

/// Products one after another, of one weight and of several: what they leave, and what is said of them.
#[test]
fn what_is_packed_is_what_the_footprint_says() {
    type Case = (usize, usize, usize, &'static [usize]);
    let cases: [&[Case]; 5] = [
        &[(1, 50, 100, &[70])],
        &[(3, 2100, 600, &[700])],
        &[(2, 300, 2100, &[500])],
        // Cut each for itself: into wider tasks than their sum would be.
        &[(8, 1024, 64, &[2048, 512, 512])],
        // Few wide tasks, then many narrow ones.
        &[(4, 70, 600, &[96]), (4, 700, 40, &[300, 300])],
    ];
    for kernel in Kernel::all() {
        for products_of in cases {
            let threads = products_of[0].0;
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let mut packed = Packed::default();
            let mut sizes = Vec::new();
            for &(_, tokens, inner, columns) in products_of {
                let x = numbers(tokens * inner, 1);
                let weights: Vec<_> = columns
                    .iter()
                    .map(|columns| stored(&numbers(columns * inner, 2)))
                    .collect();
                let mut outs: Vec<_> = columns
                    .iter()
                    .map(|some| vec![0.0; tokens * some])
                    .collect();
                let mut jobs: Vec<Job<'_>> = outs
                    .iter_mut()
                    .zip(&weights)
                    .zip(columns)
                    .map(|((out, weight), &columns)| Job {
                        weight: Factor::Stored(Values::Bf16(weight)),
                        columns,
                        out,
                        stride: columns,
                    })
                    .collect();
                pool.install(|| products(kernel, &x, inner, &mut jobs, &mut packed));
                sizes.push(Product {
                    kernel,
                    tokens,
                    columns: columns.to_vec(),
                    inner,
                    is_kept: false,
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
fn rows_may_lie_apart_and_what_is_between_them_is_kept() {
    let (tokens, inner, columns, stride) = (35, 64, 20, 33);
    let (x, weight) = (
        numbers(tokens * inner, 7),
        stored(&numbers(columns * inner, 8)),
    );
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
        let between = apart
            .chunks(stride)
            .flat_map(|row| row.iter().skip(columns));
        assert!(between.copied().all(|value| value == 7.0));
    }
}

#[test]
fn a_weight_packed_once_gives_the_bits_of_one_packed_each_time() {
    let (tokens, inner, columns) = (37, 2300, 150);
    let (x, weight) = (
        numbers(tokens * inner, 9),
        stored(&numbers(columns * inner, 10)),
    );
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
