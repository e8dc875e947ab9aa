//! The products of one token against the formula, for every set of instructions of this CPU.

use half::bf16;

use super::super::compact::{CompactMatrix, KeptForm};
use super::super::product::{RestoredWeight, RowBuffer};
use super::super::stored::{StoredDtype, StoredMatrix};
use super::rows::Instructions;
use super::{Input, InputForm, compact_by, dense_by};

const DTYPES: [StoredDtype; 3] = [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16];

/// Columns that end a group, a vector, a byte and a block of scales at different places.
const SHAPES: [(usize, usize); 10] = [
    (1, 1),
    (3, 31),
    (5, 63),
    (4, 64),
    (5, 65),
    (300, 128),
    (7, 129),
    (9, 777),
    (1100, 192),
    (2, 70_001),
];

/// Random numbers: periodic numbers would add up in some lanes and cancel, with large rounding errors.
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect()
}

/// Random weights. Row 0 has no zeros, row 1 nothing else; of the further rows, row `r` has `r` eighths of zeros, modulo 9.
fn pruned(rows: usize, columns: usize, seed: u32) -> Vec<f32> {
    let chance = noise(rows * columns, seed + 1);
    let mut values = noise(rows * columns, seed);
    for (at, (value, chance)) in values.iter_mut().zip(chance).enumerate() {
        let share = match at / columns {
            0 => 0.0,
            1 => 1.0,
            row => (row % 9) as f32 / 8.0,
        };
        if chance + 0.5 < share {
            *value = 0.0;
        }
    }
    values
}

fn input(x: &[f32]) -> Input {
    let mut input = Input::default();
    input.set(x, |_| true);
    input
}

fn compact(matrix: &StoredMatrix, form: KeptForm) -> CompactMatrix {
    CompactMatrix::of(matrix, form).unwrap()
}

fn product(by: Instructions, matrix: &StoredMatrix, x: &Input, form: InputForm) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.rows()];
    dense_by(by, matrix, x, form, &mut out);
    out
}

fn product_of_kept(
    by: Instructions,
    matrix: &CompactMatrix,
    x: &Input,
    form: InputForm,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.rows()];
    compact_by(by, matrix, x, form, &mut out);
    out
}

/// The form of the input for products in f32.
fn form_in_f32(by: Instructions, dtype: StoredDtype) -> InputForm {
    match dtype {
        StoredDtype::Bf16 => by.form_of_bf16(false),
        _ => InputForm::Wide,
    }
}

/// The weights of 8-bit codes.
fn restored(coded: &CompactMatrix) -> Vec<f32> {
    let mut buffer = RowBuffer::default();
    coded.restore(0..coded.rows(), 0..coded.columns(), &mut buffer);
    buffer.whole
}

/// W·x in f64, of the stored weights.
fn exact(matrix: &StoredMatrix, x: &[f32]) -> Vec<f64> {
    let mut wide = vec![0.0; matrix.elements()];
    matrix.widen_rows(0, &mut wide);
    let rows = wide.chunks(matrix.columns());
    rows.map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()).collect()
}

/// Products below 1/4, whose sums stay near 0.1 · √columns, rounded to `digits` at every step.
fn assert_close(got: &[f32], exact: &[f64], columns: usize, digits: f64, what: &str) {
    let tolerance = digits * (1.0 + (columns as f64).sqrt());
    for (row, (got, exact)) in got.iter().zip(exact).enumerate() {
        let error = (f64::from(*got) - exact).abs();
        assert!(error < tolerance, "{what}, row {row}: {got} {exact}");
    }
}

#[test]
fn products_equal_the_formula_with_and_without_stored_zeros() {
    for (rows, columns) in SHAPES {
        let (values, x) = (pruned(rows, columns, 1), noise(columns, 3));
        let input = input(&x);
        for dtype in DTYPES {
            let matrix = StoredMatrix::from_f32(dtype, rows, columns, &values);
            let without = compact(&matrix, KeptForm::Stored(dtype));
            let exact = exact(&matrix, &x);
            for (number, by) in Instructions::all().into_iter().enumerate() {
                let what = format!("set {number}, {dtype:?} {rows} x {columns}");
                let form = form_in_f32(by, dtype);
                let dense = product(by, &matrix, &input, form);
                assert_close(&dense, &exact, columns, 1e-6, &what);
                let kept = product_of_kept(by, &without, &input, form);
                assert_eq!(bits(&dense), bits(&kept), "{what}");
            }
        }
    }
}

#[test]
fn products_of_bf16_pairs_equal_the_formula_of_rounded_factors() {
    let sets = Instructions::all().into_iter();
    let sets: Vec<_> =
        sets.filter(|by| by.has_pairs() || matches!(by, Instructions::Portable(_))).collect();
    for (rows, columns) in SHAPES {
        let (values, x) = (pruned(rows, columns, 5), noise(columns, 7));
        let rounded: Vec<f32> = x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        let input = input(&x);
        let matrix = StoredMatrix::from_f32(StoredDtype::Bf16, rows, columns, &values);
        let without = compact(&matrix, KeptForm::Stored(StoredDtype::Bf16));
        let exact = exact(&matrix, &rounded);
        for (number, by) in sets.iter().enumerate() {
            let what = format!("set {number}, {rows} x {columns}");
            let dense = product(*by, &matrix, &input, InputForm::Pairs);
            assert_close(&dense, &exact, columns, 1e-6, &what);
            let kept = product_of_kept(*by, &without, &input, InputForm::Pairs);
            assert_eq!(bits(&dense), bits(&kept), "{what}");
        }
    }
}

#[test]
fn eight_bit_codes_are_within_half_a_step_and_multiply_either_input() {
    for (rows, columns) in SHAPES {
        let (values, x) = (pruned(rows, columns, 9), noise(columns, 11));
        let input = input(&x);
        let matrix = StoredMatrix::from_f32(StoredDtype::Bf16, rows, columns, &values);
        let coded = compact(&matrix, KeptForm::Codes);
        let wide = restored(&coded);
        let mut stored = vec![0.0; rows * columns];
        matrix.widen_rows(0, &mut stored);
        for (at, (restored, stored)) in wide.iter().zip(&stored).enumerate() {
            // The scale of a block is at most 0.5 / 127, rounded up.
            assert!((restored - stored).abs() <= 0.502 / 254.0, "element {at}");
            assert!(*stored != 0.0 || *restored == 0.0, "a zero stays zero");
        }
        let of_codes = StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &wide);
        let exact = exact(&of_codes, &x);
        let all = compact(&matrix, KeptForm::AllCodes);
        assert_eq!(bits(&restored(&all)), bits(&wide));
        assert_eq!(all.kept(), rows * columns);
        for (number, by) in Instructions::all().into_iter().enumerate() {
            let what = format!("set {number}, {rows} x {columns}");
            for form in [InputForm::Wide, InputForm::Codes] {
                let of = |matrix| bits(&product_of_kept(by, matrix, &input, form));
                assert_eq!(of(&all), of(&coded), "{what}, stored zeros");
            }
            let floats = product_of_kept(by, &coded, &input, InputForm::Wide);
            assert_close(&floats, &exact, columns, 1e-6, &what);
            // Activations are rounded to steps of at most 0.5 / 127, an error of a quarter of a step on average.
            let codes = product_of_kept(by, &coded, &input, InputForm::Codes);
            assert_close(&codes, &exact, columns, 2e-3, &what);
        }
    }
}

#[test]
fn codes_of_codes_equal_the_sum_of_their_integers() {
    let (rows, columns) = (4, 300);
    let mut values = pruned(rows, columns, 13);
    // The largest codes of either sign, and the largest activations.
    values[..4].copy_from_slice(&[0.5, -0.5, 0.5, -0.5]);
    let x: Vec<f32> = (0..columns).map(|at| if at % 3 == 0 { -1.0 } else { 1.0 }).collect();
    let coded =
        compact(&StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &values), KeptForm::Codes);
    let wide = restored(&coded);
    let exact = exact(&StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &wide), &x);
    for by in Instructions::all() {
        // Activations of ±1 have codes of ±127, without an error.
        let got = product_of_kept(by, &coded, &input(&x), InputForm::Codes);
        assert_close(&got, &exact, columns, 1e-6, "codes");
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let (rows, columns) = (3, 200);
    let mut values = vec![1.0; rows * columns];
    values[columns + 40] = f32::NAN;
    for dtype in DTYPES {
        let matrix = StoredMatrix::from_f32(dtype, rows, columns, &values);
        let without = compact(&matrix, KeptForm::Stored(dtype));
        for by in Instructions::all() {
            let x = input(&vec![1.0; columns]);
            let out = product_of_kept(by, &without, &x, form_in_f32(by, dtype));
            assert_eq!([out[0], out[2]], [200.0; 2], "{dtype:?}");
            assert!(out[1].is_nan(), "{dtype:?}");
        }
    }
    let coded = KeptForm::Codes;
    let matrix =
        StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &vec![1.0; rows * columns]);
    for wrong in [f32::NAN, f32::INFINITY] {
        let mut x = vec![1.0; columns];
        x[130] = wrong;
        for by in Instructions::all() {
            let out = product_of_kept(by, &compact(&matrix, coded), &input(&x), InputForm::Codes);
            assert!(out.iter().all(|y| y.is_nan()), "{wrong}");
        }
    }
}

#[test]
fn a_negative_zero_and_a_payload_are_kept() {
    let bits = [0x8000u16, 0x0000, 0x7fc1, 0x0001, 0x3f80];
    let mut matrix = StoredMatrix::zeros(StoredDtype::Bf16, 1, 5).unwrap();
    matrix.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(&bits));
    let without = compact(&matrix, KeptForm::Stored(StoredDtype::Bf16));
    assert_eq!(without.kept(), 4);
    let mut buffer = RowBuffer::default();
    without.restore(0..1, 0..5, &mut buffer);
    assert_eq!(buffer.half[..5], bits);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
