//! Combinations of two small adapters; the expected numbers are computed by hand.
//!
//! Both have rank 1 and α 4, so s = 4. The weights 1 and ±1/4 give √|w·s| = 2 and 1.
//!
//! ```text
//!        A                  B
//! first  [ 1, -2, 3, 0.5]   [1,  2, -1]
//! second [-5, -4, 0, 2  ]   [2, -1, -3]
//! ```

use std::cell::RefCell;
use std::fs;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::Adapter;
use super::combine::{AdapterShare, Combination, CombinationKind, MajoritySign};
use super::test_files::{TestTensor, adapter, config, pair, tensor, waves};
use crate::bytes::hex;
use crate::linalg::LowRank;

const RANK_1: &str = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 4}"#;

fn open(settings: &str, tensors: &[TestTensor]) -> (TempDir, Arc<Adapter>) {
    let folder = adapter(settings, tensors);
    let adapter = Adapter::open(folder.path()).unwrap();
    (folder, Arc::new(adapter))
}

fn key(end: &str) -> String {
    format!("base_model.model.{end}")
}

fn of_q(a: [f32; 4], b: [f32; 3]) -> (TempDir, Arc<Adapter>) {
    let tensors = [
        tensor(&key("q.lora_A.weight"), &[1, 4], &a),
        tensor(&key("q.lora_B.weight"), &[3, 1], &b),
    ];
    open(RANK_1, &tensors)
}

/// Numbers at which the first two elements stay with density 1/2, for which the limit is 2³¹.
fn half(_: usize, _: &str, numbers: &mut [u32]) {
    let drawn = [0, (1 << 31) - 1, 1 << 31, u32::MAX];
    numbers.copy_from_slice(&drawn[..numbers.len()]);
}

fn combination(
    adapters: &[&Arc<Adapter>],
    kind: CombinationKind,
    majority: MajoritySign,
    weights: &[f64],
    density: f64,
) -> Result<Combination, crate::failure::Failure> {
    let adapters = adapters.iter().map(|of| Arc::clone(of)).collect();
    let share = |at: usize, _: &str| Some(AdapterShare { weight: weights[at], density });
    Combination::new(adapters, kind, majority, &share)
}

/// A' and B' of the two adapters above.
#[track_caller]
fn check(
    kind: CombinationKind,
    majority: MajoritySign,
    second_weight: f64,
    density: f64,
    a: [f32; 4],
    b: [f32; 3],
) {
    let (_one, one) = of_q([1.0, -2.0, 3.0, 0.5], [1.0, 2.0, -1.0]);
    let (_two, two) = of_q([-5.0, -4.0, 0.0, 2.0], [2.0, -1.0, -3.0]);
    let weights = [1.0, second_weight];
    let combination = combination(&[&one, &two], kind, majority, &weights, density).unwrap();
    let factors = combination.factors("q.weight", &half).unwrap();
    assert_eq!(factors.a, a);
    assert_eq!(factors.b, b);
    assert_eq!((factors.rank, factors.scale), (1, 1.0));
}

use CombinationKind::{Cat, DareLinear, DareTies, Linear, MagnitudePrune, Ties};
use MajoritySign::{Frequency, Total};

#[test]
fn linear_adds_factors_by_the_root_of_weight_and_scale() {
    // 2 first + 1 second; a density has no meaning.
    let b = [4.0, 3.0, -5.0];
    check(Linear, Total, 0.25, 0.5, [-3.0, -8.0, 6.0, 3.0], b);
    // A negative weight has its sign on A only.
    check(Linear, Total, -0.25, 0.5, [7.0, 0.0, 6.0, -1.0], b);
}

#[test]
fn magnitude_prune_adds_the_largest_elements() {
    // int(4 / 2) = 2 of A stay: [0, -2, 3, 0] and [-5, -4, 0, 0]; int(3 / 2) = 1 of B: [0, 2, 0] and [0, 0, -3].
    let a = [-5.0, -8.0, 6.0, 0.0];
    check(MagnitudePrune, Total, 0.25, 0.5, a, [0.0, 4.0, -3.0]);
    check(MagnitudePrune, Total, 0.25, 0.0, [0.0; 4], [0.0; 3]);
}

#[test]
fn ties_averages_what_has_the_elected_sign() {
    // Sums of A: [-4, -6, 3, 2.5]. Agreeing: second; both: (2·-2 - 4) / 2; first; both: (2·0.5 + 2) / 2.
    // Sums of B: [3, 1, -4]. Agreeing: both: (2·1 + 2) / 2; first; both: (2·-1 - 3) / 2.
    let b = [2.0, 4.0, -2.5];
    check(Ties, Total, 0.25, 1.0, [-5.0, -4.0, 6.0, 1.5], b);
    // Signs are counted: a tie of + and - elects +.
    check(Ties, Frequency, 0.25, 1.0, [2.0, -4.0, 6.0, 1.5], b);
    // Elections do not see the weight.
    check(Ties, Total, -0.25, 1.0, [5.0, 0.0, 6.0, -0.5], b);
    // As many stay as in magnitude_prune: sums of A: [-5, -6, 3, 0], of B: [0, 2, -3].
    let trimmed = [-5.0, -4.0, 6.0, 0.0];
    check(Ties, Total, 0.25, 0.5, trimmed, [0.0, 4.0, -3.0]);
}

#[test]
fn dare_divides_what_stays_by_the_density() {
    // The first two elements stay: A [2, -4, 0, 0] and [-10, -8, 0, 0], B [2, 4, 0] and [4, -2, 0].
    let a = [-6.0, -16.0, 0.0, 0.0];
    check(DareLinear, Total, 0.25, 0.5, a, [8.0, 6.0, 0.0]);
    // Sums of A: [-8, -12, 0, 0]: second; both: (2·-4 - 8) / 2. Sums of B: [6, 2, 0]: both: (2·2 + 4) / 2; first: 2·4.
    let a = [-10.0, -8.0, 0.0, 0.0];
    check(DareTies, Total, 0.25, 0.5, a, [4.0, 8.0, 0.0]);
}

#[test]
fn draws_belong_to_adapter_and_factor_and_all_elements_of_equal_magnitude_are_decided() {
    let (_one, one) = of_q([1.0; 4], [1.0; 3]);
    let (_two, two) = of_q([1.0, -1.0, 1.0, 1.0], [1.0; 3]);
    let asked = RefCell::new(Vec::new());
    let draws = |adapter: usize, factor: &str, numbers: &mut [u32]| {
        let mut asked = asked.borrow_mut();
        asked.push((adapter, factor.to_owned(), numbers.len()));
    };
    let of = |kind| combination(&[&one, &two], kind, Total, &[1.0; 2], 0.5).unwrap();
    of(DareLinear).factors("q.weight", &draws).unwrap();
    let mut asked = asked.take();
    asked.sort();
    let expected = [(0, "A", 4), (0, "B", 3), (1, "A", 4), (1, "B", 3)];
    assert_eq!(asked, expected.map(|(at, factor, count)| (at, format!("q.lora_{factor}"), count)));
    // The two earlier elements of four stay: 2·1 + 2·1 and 2·1 - 2·1.
    let factors = of(MagnitudePrune).factors("q.weight", &half).unwrap();
    assert_eq!(factors.a, [4.0, 0.0, 0.0, 0.0]);
}

#[test]
fn cat_puts_ranks_side_by_side() {
    let (_one, one) = of_q([1.0, -2.0, 3.0, 0.5], [1.0, 2.0, -1.0]);
    // Rank 2, α 4: s = 2.
    let second = [
        tensor(&key("q.lora_A.weight"), &[2, 4], &[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        tensor(&key("q.lora_B.weight"), &[3, 2], &[5.0, 6.0, 7.0, 8.0, 9.0, 10.0]),
    ];
    let (_two, two) = open(&config(""), &second);
    let cat = combination(&[&one, &two], Cat, Total, &[0.5, -1.0], 1.0).unwrap();
    let factors = cat.factors("q.weight", &half).unwrap();
    let expected = LowRank {
        rows: 3,
        columns: 4,
        rank: 3,
        scale: 1.0,
        // 0.5·4 first, -1·2 second.
        a: vec![2.0, -4.0, 6.0, 1.0, -2.0, 0.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0],
        b: vec![1.0, 5.0, 6.0, 2.0, 7.0, 8.0, -1.0, 9.0, 10.0],
    };
    assert_eq!(factors, expected);
    let error = combination(&[&one, &two], Ties, Total, &[1.0; 2], 1.0).unwrap_err();
    let error = format!("{error:?}");
    assert!(error.contains("differ in rank"), "{error}");
    assert!(error.contains("`cat`"), "{error}");
}

#[test]
fn ranks_that_no_adapter_can_have_are_refused() {
    let (_folder, wide) = open(
        r#"{"peft_type": "LORA", "r": 9000}"#,
        &[
            waves(&key("v.lora_A.weight"), &[9000, 4], 0.1),
            waves(&key("v.lora_B.weight"), &[2, 9000], 0.2),
        ],
    );
    let error = combination(&[&wide, &wide], Cat, Total, &[1.0; 2], 1.0).unwrap_err();
    assert!(error.to_string().contains("rank 18000"), "{error}");
    combination(&[&wide, &wide], Linear, Total, &[1.0; 2], 1.0).unwrap();
}

/// The factors of an embedding of 5 x 4, rank 2, and a copy of its base.
fn embedding(seed: f32) -> Vec<TestTensor> {
    vec![
        waves(&key("embed.lora_embedding_A"), &[2, 5], seed),
        waves(&key("embed.lora_embedding_B"), &[4, 2], seed + 1.0),
        waves(&key("embed.base_layer.weight"), &[5, 4], seed + 2.0),
    ]
}

#[test]
fn one_adapter_is_combined_as_linear_and_the_sign_of_an_embedding_is_on_its_a() {
    let (_folder, alone) = open(&config(""), &embedding(0.5));
    let given = alone.factors("embed.weight").unwrap().unwrap();
    // s = 2: √|-2·2| = 2. B here is the transpose of A.
    let of = combination(&[&alone], Ties, Total, &[-2.0], 0.1).unwrap();
    let factors = of.factors("embed.weight", &half).unwrap();
    let times = |values: &[f32], by: f32| values.iter().map(|value| value * by).collect::<Vec<_>>();
    assert_eq!(factors.b, times(&given.b, -2.0));
    assert_eq!(factors.a, times(&given.a, 2.0));
}

#[test]
fn what_is_written_is_read_as_the_same_factors() {
    let mut first = pair("q", 3, 4);
    first.extend(embedding(0.5));
    let mut second = pair("v", 2, 4);
    second.extend(pair("q", 3, 4));
    second.extend(embedding(0.7));
    let (_one, one) = open(&config(""), &first);
    let (_two, two) = open(&config(r#", "base_model_name_or_path": "b""#), &second);
    let cat = combination(&[&two, &one], Cat, Total, &[0.3, 0.7], 1.0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("deep/adapter");
    let files = cat.write(&place, &half).unwrap();
    let opened = Adapter::open(&place).unwrap();
    assert_eq!(opened.base_model_name(), Some("b"));
    let names: Vec<&str> = opened.changed().collect();
    assert_eq!(names, ["embed.weight", "q.weight", "v.weight"]);
    for name in names {
        let expected = cat.factors(name, &half).unwrap();
        // Only the second adapter has factors of `v`.
        assert_eq!(expected.rank, if name == "v.weight" { 2 } else { 4 });
        assert_eq!(opened.factors(name).unwrap(), Some(expected), "{name}");
    }
    // peft loads the copy of the last adapter.
    let copy = |of: &Adapter| {
        let whole = of.parts()["embed.weight"].whole.clone();
        whole.unwrap().read().unwrap()
    };
    assert_eq!(copy(&opened), copy(&one));
    assert_ne!(copy(&opened), copy(&two));
    let mut found = fs::read_dir(&place).unwrap().count();
    for file in files {
        let bytes = fs::read(place.join(&file.file)).unwrap();
        assert_eq!(file.bytes, bytes.len() as u64);
        assert_eq!(file.sha256, hex(&Sha256::digest(&bytes)));
        found -= 1;
    }
    assert_eq!(found, 0, "nothing else is left");
    // Again, over what is there.
    let before = fs::read(place.join("adapter_model.safetensors")).unwrap();
    cat.write(&place, &half).unwrap();
    let after = fs::read(place.join("adapter_model.safetensors")).unwrap();
    assert_eq!(before, after);
}

#[test]
fn shares_and_adapters_without_a_combination_are_refused() {
    let (_one, one) = of_q([1.0; 4], [1.0; 3]);
    let message = |kind, weight: f64, density| {
        let refused = combination(&[&one, &one], kind, Total, &[1.0, weight], density);
        refused.unwrap_err().to_string()
    };
    assert!(message(Linear, f64::NAN, 1.0).contains("weight"));
    assert!(message(Ties, 1.0, f64::NAN).contains("density NaN"));
    assert!(message(Ties, 1.0, -0.5).contains("density -0.5"));
    assert!(message(DareTies, 1.0, 0.0).contains("density 0"));
    let huge = combination(&[&one, &one], Linear, Total, &[1e300; 2], 1.0).unwrap();
    let error = huge.factors("q.weight", &half).unwrap_err().to_string();
    assert!(error.contains("combined factors of `q.weight`"), "{error}");

    let mut saved = pair("q", 3, 4);
    saved.push(waves(&key("v.weight"), &[2, 4], 0.1));
    let (_saved, saved) = open(&config(""), &saved);
    let mut dora = pair("q", 3, 4);
    dora.push(waves(&key("q.lora_magnitude_vector"), &[3], 0.1));
    let (_dora, dora) = open(&config(r#", "use_dora": true"#), &dora);
    for (adapter, tensor) in [(&saved, "v.weight"), (&dora, "q.weight")] {
        let error = combination(&[adapter], Linear, Total, &[1.0], 1.0).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("more than factors"), "{error}");
        assert!(error.contains(tensor), "{error}");
    }
}
