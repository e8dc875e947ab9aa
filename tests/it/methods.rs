//! Conformance of every method in the table: the number of weights it declares, N:M groups, kept weights, and results that depend
//! neither on threads nor on memory settings nor on devices.

mod in_place;

use prune::failure::Failure;
use prune::linalg::{Products, StoredDtype, StoredMatrix};
use prune::pruning::{
    self, METHODS, Mask, MethodOptions, Pattern, PruningMethod, REFINEMENTS, Request, SparsityRule,
    Statistics, StatisticsKind, Target, Technique,
};

use crate::memory_settings::EXTREMES;
use crate::support::Place;

const ROWS: usize = 96;
const COLUMNS: usize = 176;

/// Numbers in [-1, 1) without much of a pattern, the same in every run.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A matrix whose magnitudes are all different in f32, apart from a few zeros.
fn matrix(dtype: StoredDtype) -> StoredMatrix {
    let count = ROWS * COLUMNS;
    // 7919 is a prime that does not divide the count, so every magnitude occurs once.
    let magnitude = |at: usize| ((at * 7919) % count + 1) as f32 / count as f32;
    let values: Vec<f32> = noise(count, 1)
        .iter()
        .enumerate()
        .map(|(at, sign)| match at % 101 {
            0 => 0.0,
            _ => magnitude(at).copysign(*sign),
        })
        .collect();
    StoredMatrix::from_f32(dtype, ROWS, COLUMNS, &values)
}

/// Statistics of three samples of 40 tokens; `first` replaces the first number.
fn collect(kind: &dyn StatisticsKind, first: Option<f32>) -> Statistics {
    let mut statistics = kind.begin(COLUMNS, Products::F32);
    for sample in 0..3 {
        let mut rows = noise(40 * COLUMNS, 100 + sample);
        rows[0] = first.unwrap_or(rows[0]);
        match &mut statistics {
            Statistics::Merged(statistics) => {
                let mut part = statistics.part();
                part.add_rows(&rows);
                statistics.merge(part.numbers());
            }
            Statistics::InPlace(statistics) => {
                statistics.add_rows(&rows);
                statistics.end_sample();
            }
        }
    }
    if let Statistics::InPlace(statistics) = &mut statistics {
        statistics.finish();
    }
    statistics
}

fn unstructured(ratio: f64) -> Target {
    let pattern = Pattern::Unstructured;
    Target { ratio, pattern }
}

fn prune(
    method: &dyn PruningMethod,
    weight: &mut StoredMatrix,
    target: Target,
    first: Option<f32>,
) -> anyhow::Result<Mask> {
    let statistics = method.statistics().map(|kind| collect(kind, first));
    let request = Request::new("model.layers.0.mlp.up_proj", statistics.as_ref(), target);
    pruning::prune(method, weight, &request)
}

/// Pruned weights in some columns of some rows.
fn count(mask: &Mask, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> usize {
    rows.map(|row| columns.clone().filter(|&column| mask.is_pruned(row, column)).count()).sum()
}

/// Checks the number that a method declares. `ties`: scores may be equal, so a threshold may take more.
fn check_count(method: &dyn PruningMethod, mask: &Mask, target: Target, ties: bool) {
    let name = method.name();
    let up_to_threshold = |count: usize, elements: usize| {
        let declared = target.count_of(elements) + 1;
        assert!(
            count == declared || ties && count > declared,
            "{name} {target:?}: {count}, {declared} declared"
        );
    };
    match method.removes(&MethodOptions::default()) {
        SparsityRule::FromRows => {
            for row in 0..ROWS {
                let count = count(mask, row..row + 1, 0..COLUMNS);
                assert_eq!(count, target.count_of(COLUMNS), "{name} {target:?} row {row}");
            }
        }
        SparsityRule::FromMatrix => up_to_threshold(mask.count() as usize, ROWS * COLUMNS),
        SparsityRule::FromBlocks { columns } => {
            for first in (0..COLUMNS).step_by(columns) {
                let block = first..COLUMNS.min(first + columns);
                up_to_threshold(count(mask, 0..ROWS, block.clone()), ROWS * block.len());
            }
        }
        SparsityRule::NearRatio => {
            let share = mask.count() as f64 / (ROWS * COLUMNS) as f64;
            assert!((share - target.ratio).abs() < 0.005, "{name} {target:?}: {share}");
        }
    }
}

/// All that holds for a method, whatever its formula.
fn check(method: &dyn PruningMethod) {
    let name = method.name();
    for dtype in [StoredDtype::F32, StoredDtype::Bf16, StoredDtype::F16] {
        let before = matrix(dtype);
        for target in [0.3, 0.5, 0.7].map(unstructured) {
            let mut weight = before.clone();
            let mask = prune(method, &mut weight, target, None).expect("valid input");
            check_count(method, &mask, target, dtype != StoredDtype::F32);
            check_kept(method, &before, weight, &mask);
        }
        let mask =
            prune(method, &mut before.clone(), unstructured(0.0), None).expect("valid input");
        assert_eq!(mask.count(), 0, "{name}: a ratio of 0 removes nothing");
        for (n, m) in [(2, 4), (1, 4), (4, 8), (5, 16)] {
            let target = Target { ratio: n as f64 / m as f64, pattern: Pattern::NOfM { n, m } };
            let mut weight = before.clone();
            let mask = prune(method, &mut weight, target, None);
            if method.is_unstructured_only() {
                let error = mask.expect_err("refused input");
                let failure = error.downcast_ref::<Failure>().expect("a refusal");
                assert!(failure.is_usage, "{name}: {failure}");
                continue;
            }
            let mask = mask.expect("valid input");
            for row in 0..ROWS {
                for first in (0..COLUMNS).step_by(m) {
                    let count = count(&mask, row..row + 1, first..first + m);
                    assert_eq!(count, n, "{name} {n}:{m} row {row} column {first}");
                }
            }
            check_kept(method, &before, weight, &mask);
        }
        let bad = Pattern::NOfM { n: 3, m: 7 };
        let target = Target { ratio: 3.0 / 7.0, pattern: bad };
        assert!(prune(method, &mut before.clone(), target, None).is_err(), "7 does not divide 176");
    }
    check_threads(method);
    check_not_finite(method);
}

/// Shape and dtype stay; after the zeros are written every weight is +0 or, unless the method changes weights, as before.
fn check_kept(
    method: &dyn PruningMethod,
    before: &StoredMatrix,
    mut after: StoredMatrix,
    mask: &Mask,
) {
    let name = method.name();
    let shape = |matrix: &StoredMatrix| (matrix.rows(), matrix.columns(), matrix.dtype());
    assert_eq!(shape(before), shape(&after), "{name}");
    assert_eq!((mask.rows(), mask.columns()), (ROWS, COLUMNS), "{name}");
    after.zero_bits(mask.bits());
    let bytes = before.dtype().bytes();
    let pairs = before.as_bytes().chunks(bytes).zip(after.as_bytes().chunks(bytes));
    for (at, (before, after)) in pairs.enumerate() {
        let is_zero = after.iter().all(|&byte| byte == 0);
        let was_zero = before.iter().all(|&byte| byte == 0);
        assert!(
            is_zero || !was_zero || method.changes_weights(),
            "{name}: a zero of the source is kept, {at}"
        );
        match mask.is_pruned(at / COLUMNS, at % COLUMNS) {
            true => assert!(is_zero, "{name}: {at}"),
            false => assert!(before == after || method.changes_weights(), "{name}: {at}"),
        }
    }
}

fn check_threads(method: &dyn PruningMethod) {
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().expect("valid input").install(|| {
            let mut weight = matrix(StoredDtype::Bf16);
            let mask = prune(method, &mut weight, unstructured(0.55), None).expect("valid input");
            (weight.as_bytes().to_vec(), mask)
        })
    };
    assert!(with(1) == with(8), "{}: 1 and 8 threads differ", method.name());
}

fn check_not_finite(method: &dyn PruningMethod) {
    let name = method.name();
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = noise(ROWS * COLUMNS, 3);
        values[5 * COLUMNS + 7] = bad;
        let mut weight = StoredMatrix::from_f32(StoredDtype::F32, ROWS, COLUMNS, &values);
        let error = prune(method, &mut weight, unstructured(0.5), None)
            .expect_err("refused input")
            .to_string();
        assert!(
            error.contains("up_proj` has a weight that is NaN or infinite at row 5, column 7"),
            "{name}: {error}"
        );
        if method.statistics().is_some() {
            let mut weight = matrix(StoredDtype::F32);
            let error = prune(method, &mut weight, unstructured(0.5), Some(bad))
                .expect_err("refused input");
            let error = error.to_string();
            assert!(
                error.contains("the input of `model.layers.0.mlp.up_proj` is not finite"),
                "{name}: {error}"
            );
        }
    }
}

#[test]
fn every_method_removes_what_it_declares_and_keeps_the_rest() {
    METHODS.iter().for_each(|method| check(*method));
    check(&in_place::GramBlocks);
}

/// Every method, alone and before every refinement that is defined after it.
fn techniques() -> Vec<Technique> {
    let of = |method: &'static dyn PruningMethod| {
        let refinements = REFINEMENTS.iter().map(|one| Some(*one));
        let all = [None].into_iter().chain(refinements);
        all.map(move |refinement| Technique { refinement, ..Technique::of(method) })
    };
    METHODS.iter().flat_map(|method| of(*method)).collect()
}

#[test]
fn zeros_of_the_source_stay_zero_under_every_technique() {
    let dense = matrix(StoredDtype::F32);
    // Six of ten weights are removed, and more of them in some rows and groups than in others.
    let removed = noise(ROWS * COLUMNS, 5);
    let is_removed = |row: usize, column: usize| {
        let limit = if row.is_multiple_of(3) { 0.6 } else { 0.1 };
        removed[row * COLUMNS + column] < limit
    };
    let mut values = vec![0.0; ROWS * COLUMNS];
    dense.widen_rows(0, &mut values);
    for (at, value) in values.iter_mut().enumerate() {
        if is_removed(at / COLUMNS, at % COLUMNS) {
            *value = 0.0;
        }
    }
    let source = StoredMatrix::from_f32(StoredDtype::F32, ROWS, COLUMNS, &values);
    let zeros = source.count_zeros();
    assert!(zeros * 2 > (ROWS * COLUMNS) as u64);
    let two_of_four = Target { ratio: 0.5, pattern: Pattern::NOfM { n: 2, m: 4 } };
    let mut seen = 0;
    for technique in techniques() {
        if technique.check().is_err() {
            continue;
        }
        let statistics = technique.statistics().map(|kind| collect(kind, None));
        for target in [unstructured(0.4), unstructured(0.8), two_of_four] {
            let is_defined =
                pruning::method::check_pattern(technique.method, "w", COLUMNS, target.pattern);
            if is_defined.is_err() {
                continue;
            }
            let name = format!("{} {target:?}", technique.name());
            let mut weight = source.clone();
            let request =
                Request::new("model.layers.0.self_attn.q_proj", statistics.as_ref(), target);
            let mask = technique.prune(&mut weight, &request).expect("it prunes");
            weight.zero_bits(mask.bits());
            let mut after = vec![0.0; ROWS * COLUMNS];
            weight.widen_rows(0, &mut after);
            let refilled = values.iter().zip(&after);
            let refilled = refilled.filter(|(before, after)| **before == 0.0 && **after != 0.0);
            assert_eq!(refilled.count(), 0, "{name}");
            if target.ratio == 0.4
                && technique.removes() == SparsityRule::NearRatio
                && technique.method.changes_weights()
            {
                // The support is all that there is, so nothing is lost and least squares changes nothing.
                assert_eq!(weight.count_zeros(), zeros, "{name}");
                let off = values.iter().zip(&after).map(|(a, b)| (a - b).abs());
                assert!(off.fold(0.0, f32::max) < 1e-4, "{name}");
            }
            if target.ratio == 0.8 {
                let sparsity = weight.count_zeros() as f64 / (ROWS * COLUMNS) as f64;
                assert!(sparsity < 0.82, "{name}: {sparsity}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 3 * METHODS.len(), "{seen}");
}

#[test]
fn a_refinement_that_takes_weights_back_is_refused_after_a_method_that_changes_weights() {
    let place = Place::new();
    let (mut refused, mut accepted) = (0, 0);
    for technique in techniques() {
        let Some(refinement) = technique.refinement else {
            continue;
        };
        let (method, refinement) = (technique.method.name(), refinement.name());
        let is_undefined = refinement == "dsnot" && technique.method.changes_weights();
        assert_eq!(technique.check().is_err(), is_undefined, "{}", technique.name());
        if !is_undefined {
            accepted += 1;
            continue;
        }
        refused += 1;
        // A sweep records such a cell (`sweep::impossible`).
        let command = format!(
            "--model m --prune-method {method} --refine {refinement} --sparsity-ratio 0.5 --dataset train.txt --save out"
        );
        let ran = place.run(&command);
        assert_eq!(ran.code, 2, "{command}\n{}", ran.stderr);
        let message = format!("--refine {refinement} is not defined after --prune-method {method}");
        assert!(ran.stderr.contains(&message), "{}", ran.stderr);
        assert!(!place.path("out").exists(), "{command}");
    }
    assert!(refused == 3 && accepted > 8, "{refused} {accepted}");
}

#[test]
fn a_target_below_the_zeros_of_the_source_is_reported() {
    let place = Place::new();
    masks(&place, "--prune-method magnitude --sparsity-ratio 0.6");
    std::fs::rename(place.path("out/model"), place.path("sparse")).expect("it moves");
    for method in ["magnitude", "ladder"] {
        let flags = format!(
            "--model sparse --prune-method {method} --sparsity-ratio 0.3 --eval none --dataset train.txt --nsamples 3 --seqlen 64 --force --save out"
        );
        let ran = place.run(&flags);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let warned = place.manifest("out").warnings;
        let is_it = |text: &String| text.contains("more than the 0.3000 that were asked for");
        assert!(warned.iter().any(is_it), "{warned:?}");
    }
}

#[test]
fn names_are_unique_and_lead_to_their_methods() {
    for method in METHODS {
        let found = pruning::method(method.name()).expect("the table has it");
        assert_eq!(format!("{found:?}"), format!("{method:?}"));
        assert!(!method.summary().is_empty());
    }
}

/// A run of the program, small enough for many of them.
fn masks(place: &Place, flags: &str) -> Vec<Option<String>> {
    let base =
        "--model m --eval none --dataset train.txt --nsamples 3 --seqlen 64 --force --save out";
    let ran = place.run(&format!("{base} {flags}"));
    assert_eq!(ran.code, 0, "{flags}\n{}", ran.stderr);
    let layers = place.manifest("out").layers;
    let matrices = layers.into_iter().flat_map(|layer| layer.matrices);
    matrices.map(|matrix| matrix.mask_sha256).collect()
}

#[test]
fn no_thread_count_memory_setting_or_device_changes_the_masks_of_a_method() {
    let place = Place::new();
    for method in METHODS {
        let name = method.name();
        let verify = match method.changes_weights() {
            true => "",
            false => "--verify full",
        };
        let run = |flags: &str| {
            masks(&place, &format!("--prune-method {name} --sparsity-ratio 0.55 {verify} {flags}"))
        };
        let expected = run("--threads 1");
        assert_eq!(expected.iter().flatten().count(), 14, "{name}");
        assert!(run("--threads 8") == expected, "{name}");
        for settings in EXTREMES.iter().filter(|settings| !settings.contains("head_rows")) {
            let settings = settings.replace(' ', "");
            assert!(run(&format!("--memory-settings {settings}")) == expected, "{name} {settings}");
        }
        let gpus = r#"{"gpus":["2GiB","2GiB"],"refuse":"12"}"#;
        assert!(run(&format!("--device cuda --simulate {gpus}")) == expected, "{name}");
    }
}

#[test]
fn the_variant_warns_where_it_misses_its_ratio() {
    let place = Place::new();
    let run = |ratio: &str| {
        let flags = format!("--use-variant --sparsity-ratio {ratio}");
        masks(&place, &flags);
        place.manifest("out")
    };
    let missed = run("0.99");
    let sparsity = missed.sparsity.expect("pruned").ratio;
    assert!(sparsity < 0.98, "a share of 0.8 of the scores is not 0.99 of the weights: {sparsity}");
    let warning =
        format!("wanda-variant removed {sparsity:.4} of the weights, 0.9900 were asked for");
    assert!(missed.warnings.iter().any(|text| text.starts_with(&warning)), "{:?}", missed.warnings);
    assert_eq!(missed.pruning.expect("pruned").method, "wanda-variant");
    assert!(run("0.5").warnings.iter().all(|text| !text.contains("asked for")));
}
