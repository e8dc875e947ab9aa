//! The codec of NF4 against what bitsandbytes computed, and its own rules.

use super::*;
use crate::linalg::StoredDtype;
use crate::linalg::convert::{narrow, widen};
use crate::linalg::golden_tests::{golden_f32, golden_tensor};

const FILE: &str = "bnb.nf4.safetensors";
const CASES: [&str; 7] = [
    "dense.q_proj",
    "dense.k_proj",
    "pruned.q_proj",
    "pruned.gate_proj",
    "pruned.down_proj",
    "ragged",
    "zero_row",
];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn quantised(weights: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut packed = vec![0xee; packed_bytes(weights.len())];
    let mut absmax = vec![f32::NAN; blocks(weights.len())];
    quantise(weights, &mut packed, &mut absmax);
    (packed, absmax)
}

fn restored(weights: usize, packed: &[u8], absmax: &[f32]) -> Vec<f32> {
    let mut values = vec![f32::NAN; weights];
    dequantise(0..weights, packed, absmax, &mut values);
    values
}

#[test]
fn the_codebook_is_that_of_the_reference() {
    let Some(expected) = golden_f32(FILE, "nf4_code") else {
        return;
    };
    assert_eq!(bits(&CODEBOOK), bits(&expected));
    let nested = golden_f32(FILE, "nested_code").unwrap();
    assert_eq!(bits(DynamicMap::signed().values()), bits(&nested));
}

#[test]
fn single_and_double_quantisation_equal_the_reference_bit_for_bit() {
    for case in CASES {
        let Some(weights) = golden_f32(FILE, &format!("{case}.weight")) else {
            return;
        };
        let mut narrowed = Vec::new();
        narrow(StoredDtype::Bf16, &weights, &mut narrowed);
        let mut rounded = vec![0.0; weights.len()];
        widen(StoredDtype::Bf16, &narrowed, &mut rounded);

        for tag in ["single", "double"] {
            let key = |part: &str| format!("{case}.{tag}.{part}");
            let scales_of = |absmax: &[f32]| match tag {
                "single" => absmax.to_vec(),
                _ => NestedScales::new(absmax).scales(),
            };
            let (packed, absmax) = quantised(&weights);
            assert_eq!(packed, golden_tensor(FILE, &key("packed")).unwrap().1, "{case}");
            if tag == "single" {
                assert_eq!(bits(&absmax), bits(&golden_f32(FILE, &key("absmax")).unwrap()));
            } else {
                let nested = NestedScales::new(&absmax);
                let offset = golden_f32(FILE, &key("offset")).unwrap();
                assert_eq!(bits(&[nested.offset]), bits(&offset), "{case}");
                let tops = golden_f32(FILE, &key("nested_absmax")).unwrap();
                assert_eq!(bits(&nested.absmax), bits(&tops), "{case}");
                assert_eq!(nested.codes, golden_tensor(FILE, &key("absmax")).unwrap().1);
            }
            let values = restored(weights.len(), &packed, &scales_of(&absmax));
            let expected = golden_f32(FILE, &key("dequantised")).unwrap();
            assert_eq!(bits(&values), bits(&expected), "{case} {tag}");

            let (packed, absmax) = quantised(&rounded);
            let values = restored(weights.len(), &packed, &scales_of(&absmax));
            let mut halves = Vec::new();
            narrow(StoredDtype::Bf16, &values, &mut halves);
            let expected = golden_tensor(FILE, &key("dequantised_bf16")).unwrap().1;
            // The reference rounds its scales to bf16 first, so its offset differs.
            if (case, tag) == ("zero_row", "double") {
                continue;
            }
            assert_eq!(halves, expected, "{case} {tag}");
        }
    }
}

#[test]
fn zeros_stay_zero_and_a_zero_block_has_scale_zero() {
    let mut weights: Vec<f32> = (0..130).map(|i| ((i * 37) as f32).sin()).collect();
    weights[64..128].fill(-0.0);
    weights[129] = 0.0;
    let (packed, absmax) = quantised(&weights);
    assert_eq!(absmax[1], 0.0);
    assert!(packed[32..64].iter().all(|&byte| byte == 0x77));
    let values = restored(130, &packed, &absmax);
    for (before, after) in weights.iter().zip(&values) {
        assert!(*before != 0.0 || after.to_bits() == 0, "{before} {after}");
    }
    // A block below the reach of a reciprocal is a block of zeros, not of infinities.
    let (packed, absmax) = quantised(&[1e-40, 0.0]);
    assert_eq!((packed, absmax), (vec![0x77], vec![0.0]));
}

#[test]
fn an_exact_middle_takes_the_lower_code() {
    // absmax 1, so scaling changes nothing.
    for (code, pair) in CODEBOOK.windows(2).enumerate() {
        let middle = (pair[0] + pair[1]) / 2.0;
        let (packed, _) = quantised(&[1.0, middle, middle.next_up(), middle.next_down()]);
        let code = code as u8;
        assert_eq!(packed, [0xf0 | code, (code + 1) << 4 | code], "{middle}");
    }
}

#[test]
fn any_range_is_the_same_piece_of_the_whole() {
    let weights: Vec<f32> = (0..40_003).map(|i| ((i * 31) as f32).cos()).collect();
    let (packed, absmax) = quantised(&weights);
    let whole = restored(weights.len(), &packed, &absmax);
    for range in [0..0, 0..1, 3..64, 63..66, 64..128, 65..40_003, 127..30_001, 40_002..40_003] {
        let mut piece = vec![f32::NAN; range.len()];
        dequantise(
            range.clone(),
            &packed[range.start / 2..],
            &absmax[range.start / BLOCK..],
            &mut piece,
        );
        assert_eq!(bits(&piece), bits(&whole[range.clone()]), "{range:?}");
    }
    // Pieces of whole blocks, quantised alone, are pieces of the whole.
    let cut = 313 * BLOCK;
    let (first, last) = weights.split_at(cut);
    let pieces = [quantised(first), quantised(last)];
    assert_eq!([&pieces[0].0[..], &pieces[1].0[..]].concat(), packed);
    assert_eq!([&pieces[0].1[..], &pieces[1].1[..]].concat(), absmax);
}

#[test]
fn the_mean_of_many_scales_is_close_to_that_in_f64() {
    for count in [1, 15, 16, 63, 64, 1023, 100_000, 3_000_001] {
        let scales: Vec<f32> = (0..count).map(|i| 1.0 + ((i % 977) as f32) * 1e-3).collect();
        let exact = scales.iter().map(|&scale| f64::from(scale)).sum::<f64>() / f64::from(count);
        assert!((f64::from(mean(&scales)) - exact).abs() < 1e-6 * exact, "{count}");
    }
}
