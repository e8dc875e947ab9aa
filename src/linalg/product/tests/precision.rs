//! Rounding: products by parts, the parts of a number, and rows that are rounded while they are packed.

use super::super::super::stored::StoredDtype;
use super::*;

/// The error of a kernel for weights in a dtype: the root of the mean square and the maximum, relative to Σ|x·w|.
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
            let (sum, size) = products
                .fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
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
    // Every bit of the significand is used, and sizes vary as in activations.
    let x: Vec<f32> = numbers(tokens * inner, 21)
        .iter()
        .enumerate()
        .map(|(at, value)| value * 10.0f32.powi((at * 31 % 7) as i32 - 3))
        .collect();
    let values = numbers(columns * inner, 22);
    let halves: Vec<f16> = values.iter().map(|&value| f16::from_f32(value * 0.03)).collect();
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
        assert!(by_parts.1 <= 1.5 * fused.1, "{dtype:?}: {by_parts:?} {fused:?}");
        // One part fewer is not enough.
        if let Kernel::Split(parts @ 2..) = Kernel::split(dtype) {
            let fewer = error_of(Kernel::Split(parts - 1), weight, wide, &x, inner);
            assert!(fewer.0 > 3.0 * by_parts.0, "{dtype:?}: {fewer:?} {by_parts:?}");
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
        let sum: f64 = parts.iter().map(|&part| bf16::from_bits(part).to_f64()).sum();
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
    for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
        assert!(bf16::from_bits(rounded(nan)).is_nan());
    }
}

/// Every packing of rows on this CPU gives the bits of [`take_part`], or zero for a subnormal number.
fn parts_are_taken_one_by_one<const PARTS: usize>() {
    // Three whole steps and the beginning of a fourth; more rows than a tile, fewer than a block.
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
    // Each number in a row of its own, and all numbers in the last row.
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
            let value = if is_there { values[row * inner + at] } else { 0.0 };
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
fn packed_rows_have_the_bits_of_a_loop_over_elements() {
    parts_are_taken_one_by_one::<1>();
    parts_are_taken_one_by_one::<3>();
}

/// Every packing of columns on this CPU gives the bits of [`take_part`] for all stored dtypes, or zero for a subnormal number.
fn parts_of_columns_are_taken_one_by_one<const PARTS: usize>() {
    // Three whole steps and the beginning of a fourth; more columns than a tile, fewer than two.
    let (columns, inner) = (19, 3 * 32 + 5);
    let mut numbers = numbers(columns * inner, 12);
    let odd = [0.0, -0.0, 65504.0, 1e9, f32::MAX, f32::INFINITY, f32::NAN, 6e-8, 1e-45, 1e-38];
    for (at, odd) in odd.into_iter().enumerate() {
        numbers[at * inner + 7 * at % 96] = odd;
    }
    let halves: Vec<f16> = numbers.iter().map(|&value| f16::from_f32(value)).collect();
    let brains = stored(&numbers);
    let steps = inner.div_ceil(32);
    for values in [Values::F32(&numbers), Values::F16(&halves), Values::Bf16(&brains)] {
        let mut lines = vec![Line([7; 32]); 2 * steps * PARTS * 16];
        let strided = Strided::rows(values, inner);
        super::tiles::pack_columns::<PARTS>(strided, columns, inner, 2, &mut lines);
        let mut wide = vec![0.0; numbers.len()];
        values.widen(0, &mut wide);
        for (column, at) in (0..32).flat_map(|column| (0..32 * steps).map(move |at| (column, at))) {
            let is_there = column < columns && at < inner;
            let value = if is_there { wide[column * inner + at] } else { 0.0 };
            let mut rest = value;
            for part in 0..PARTS {
                let wanted = bf16::from_bits(take_part::<PARTS>(&mut rest));
                let line = ((column / 16 * steps + at / 32) * PARTS + part) * 16 + at % 32 / 2;
                let got = bf16::from_bits(lines[line].0[2 * (column % 16) + at % 2]);
                let is_same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                let is_tiny = got == bf16::ZERO && wanted.to_f32().abs() <= f32::MIN_POSITIVE;
                assert!(is_same || is_tiny, "{value}, part {part}: {got} {wanted}");
            }
        }
    }
}

#[test]
fn packed_columns_have_the_bits_of_a_loop_over_elements() {
    parts_of_columns_are_taken_one_by_one::<1>();
    parts_of_columns_are_taken_one_by_one::<2>();
    parts_of_columns_are_taken_one_by_one::<3>();
}
