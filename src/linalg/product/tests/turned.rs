//! Factors that are read by columns, and products that are added, against products of the same numbers in rows.

use super::super::super::stored::StoredDtype;
use super::*;

/// `[rows, columns]` as `[columns, rows]`.
fn turned<T: Copy>(values: &[T], columns: usize) -> Vec<T> {
    let rows = values.len() / columns;
    (0..values.len()).map(|at| values[at % rows * columns + at / rows]).collect()
}

#[test]
fn factors_read_by_columns_give_the_bits_of_those_read_by_rows() {
    for (tokens, columns, inner) in [(1, 1, 1), (5, 37, 70), (33, 50, 513), (130, 129, 1100)] {
        let (x, w) = (numbers(tokens * inner, 1), numbers(columns * inner, 2));
        let (x_turned, w_turned) = (turned(&x, inner), turned(&w, inner));
        let (bf16, bf16_turned) = (stored(&w), stored(&w_turned));
        for kernel in Kernel::all() {
            for (w, w_turned) in [
                (Values::F32(&w), Values::F32(&w_turned)),
                (Values::Bf16(&bf16), Values::Bf16(&bf16_turned)),
            ] {
                // Elements between rows belong to somebody else.
                let stride = columns + 3;
                let run = |x: Strided<'_>, weight: Factor<'_>, adds: bool| {
                    let mut out = vec![0.5; tokens * stride];
                    let mut jobs = [ProductJob { weight, columns, out: &mut out, stride, adds }];
                    let mut packed = Packed::default();
                    kernel.products_of(x, (tokens, inner), &mut jobs, &mut packed);
                    out
                };
                let straight = Strided::rows(Values::F32(&x), inner);
                let across = Strided::transposed(Values::F32(&x_turned), tokens);
                let factor = Factor::Strided(Strided::transposed(w_turned, columns));
                let plain = run(straight, Factor::Stored(w), false);
                assert!(
                    run(across, factor, false) == plain,
                    "{kernel:?} {tokens} {columns} {inner}"
                );
                let sum = run(across, factor, true);
                for (at, (sum, plain)) in sum.iter().zip(&plain).enumerate() {
                    let is_gap = at % stride >= columns;
                    let expected = if is_gap { 0.5 } else { 0.5 + plain };
                    // Up to 1100 products below 1, summed in a different order.
                    assert!((sum - expected).abs() < 1e-4, "{kernel:?}: {sum} {expected}");
                }
            }
        }
    }
}

#[test]
fn a_part_of_the_columns_of_a_factor_is_a_factor() {
    let (tokens, columns, inner, wide) = (40, 70, 60, 100);
    let (x, w) = (numbers(tokens * wide, 3), numbers(columns * inner, 4));
    let first = 25;
    let part: Vec<f32> =
        x.chunks(wide).flat_map(|row| row[first..first + inner].to_vec()).collect();
    let kernel = Kernel::Fused;
    let run = |x: Strided<'_>| {
        let mut out = vec![0.0; tokens * columns];
        let mut jobs = [ProductJob {
            weight: Factor::Stored(Values::F32(&w)),
            columns,
            out: &mut out,
            stride: columns,
            adds: false,
        }];
        kernel.products_of(x, (tokens, inner), &mut jobs, &mut Packed::default());
        out
    };
    let of_whole = run(Strided::rows(Values::F32(&x), wide).at(0, first));
    assert!(of_whole == run(Strided::rows(Values::F32(&part), inner)));
}

#[test]
#[should_panic(expected = "shapes of a product must match")]
fn a_factor_beyond_its_slice_is_refused() {
    let (x, w) = (numbers(6, 1), numbers(5, 2));
    let mut out = [0.0; 4];
    let mut jobs = [ProductJob {
        weight: Factor::Strided(Strided::transposed(Values::F32(&w), 2)),
        columns: 2,
        out: &mut out,
        stride: 2,
        adds: false,
    }];
    let rows = Strided::rows(Values::F32(&x), 3);
    let kernel = Kernel::split(StoredDtype::F32);
    let kernel = if Kernel::has_split() { kernel } else { Kernel::Fused };
    kernel.products_of(rows, (2, 3), &mut jobs, &mut Packed::default());
}
