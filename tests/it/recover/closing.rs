//! `prune recover --close-to`: exact zeros for every way, pattern and optimizer, the best state, the record, and refusals.

use prune::linalg::StoredDtype;
use prune::run::Manifest;

use super::{COMMON, matrices, pruned};
use crate::support::Place;

/// Trainings from half of the weights, or from the dense model `m`: flags, and the sparsity in the end.
const CLOSED: [(&str, f64); 6] = [
    ("--how full --close-to 0.8 --close-by 0.5 --mask-every 1", 0.8),
    ("--how full --close-to 0.7 --optim paged-adamw8bit --train-norms", 0.7),
    ("--how full --close-to 0.9 --optim sgd --held-out 0", 0.9),
    ("--how full --close-to 0.8 --teacher m --keep-activations 1 --close-by 1", 0.8),
    ("--how blocks --close-to 0.8 --teacher m --nsamples 16", 0.8),
    ("--how blocks --close-to 0.55 --teacher m --nsamples 16 --optim adamw8bit", 0.55),
];

fn run(place: &Place, more: &str) -> Manifest {
    let ran = place.run(&format!("{COMMON} --lr 3e-3 {more} --save out --force"));
    assert_eq!(ran.code, 0, "{more}: {}", ran.stderr);
    place.manifest("out")
}

/// The number of zeros of each matrix, in the order of the names, with its elements. All zeros are +0.
fn zeros(place: &Place) -> Vec<(String, usize, usize)> {
    let of = |(name, values): (String, Vec<f32>)| {
        let zeros = values.iter().filter(|value| **value == 0.0).count();
        let positive = values.iter().filter(|value| value.to_bits() == 0).count();
        assert_eq!(zeros, positive, "{name}");
        (name, zeros, values.len())
    };
    matrices(&place.path("out/model")).into_iter().map(of).collect()
}

#[test]
fn every_matrix_has_the_zeros_that_were_asked_for() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    for (way, target) in CLOSED {
        let manifest = run(&place, way);
        for (name, zeros, elements) in zeros(&place) {
            assert_eq!(zeros, (elements as f64 * target) as usize, "{way}: {name}");
        }
        let recovery = manifest.recovery.expect("a training");
        let closing = recovery.closing.expect("masks closed");
        assert_eq!((closing.before, closing.to.as_str()), (0.5, &*target.to_string()));
        let rising: Vec<f64> = closing.choices.iter().map(|choice| choice.sparsity).collect();
        assert!(rising.is_sorted() && rising.len() > 2, "{way}: {rising:?}");
        assert_eq!(rising.last(), Some(&target), "{way}");
        assert_eq!(closing.choices.last().map(|choice| choice.step), Some(closing.last_step));
        // The best state has the last masks, although earlier losses are lower.
        let is_late = recovery.best_step.is_none_or(|best| best >= closing.last_step);
        assert!(is_late, "{way}: {:?}", recovery.best_step);
    }
}

#[test]
fn groups_of_a_dense_model_close_to_a_pattern() {
    let place = pruned(StoredDtype::Bf16, "--sparsity-ratio 0.5");
    // The dense model may be its own teacher: the first choice makes them different.
    for way in ["--how full --teacher m", "--how full --optim paged-adamw8bit"] {
        let line = format!("{COMMON} {way} --lr 3e-3 --close-to 2:4 --save out --force");
        let ran = place.run(&line.replace("pruned/model", "m"));
        assert_eq!(ran.code, 0, "{way}: {}", ran.stderr);
        for (name, values) in matrices(&place.path("out/model")) {
            for group in values.chunks(4) {
                let zeros = group.iter().filter(|value| **value == 0.0).count();
                assert_eq!(zeros, 2, "{way}: {name}");
            }
        }
        let closing = place.manifest("out").recovery.expect("a training").closing;
        assert_eq!(
            closing.expect("masks closed").choices.last().map(|one| one.sparsity),
            Some(0.5)
        );
    }
}

#[test]
fn layers_have_their_own_sparsity() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    std::fs::write(place.path("ratios.json"), r#"{"1": 0.6}"#).expect("written");
    let manifest = run(&place, "--how full --close-to 0.8 --layer-ratios ratios.json");
    let closing = manifest.recovery.and_then(|of| of.closing).expect("masks closed");
    assert_eq!((closing.layer_ratios, closing.to.as_str()), (vec![0.8, 0.6], "0.8"));
    let card = std::fs::read_to_string(place.path("out/model/README.md")).expect("a card");
    assert!(card.contains("--layer-ratios layer_ratios.json"), "{card}");
    assert!(card.contains("while it trained") && !place.path("out/model/pruning.json").exists());
    for (name, zeros, elements) in zeros(&place) {
        let target = if name.contains("layers.1.") { 0.6 } else { 0.8 };
        assert_eq!(zeros, (elements as f64 * target) as usize, "{name}");
    }
    let manifest = run(&place, "--how full --close-to 0.8 --allocate owl");
    let zeros = zeros(&place);
    let of_layer = |layer: &str| -> f64 {
        let layer = zeros.iter().filter(|(name, ..)| name.contains(layer));
        let [zeros, elements] = layer.fold([0, 0], |[a, b], (_, c, d)| [a + c, b + d]);
        zeros as f64 / elements as f64
    };
    let [first, second] = ["layers.0.", "layers.1."].map(of_layer);
    assert!(
        (first + second - 1.6).abs() < 1e-3 && (first - second).abs() > 0.01,
        "{first} {second}"
    );
    assert!(manifest.recovery.expect("a training").closing.is_some());
}

#[test]
fn threads_places_and_pages_change_no_bit_of_closing_masks() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    for way in
        ["--how full --close-to 0.8", "--how blocks --close-to 0.8 --teacher m --nsamples 16"]
    {
        let model = |more: &str| {
            run(&place, &format!("{way} --eval none {more}"));
            matrices(&place.path("out/model"))
        };
        let first = model("--threads 1");
        for more in ["--threads 2", "--hidden-states disk", "--optim paged-adamw32bit"] {
            assert!(model(more) == first, "{way} {more}");
        }
    }
}

#[test]
fn masks_that_cannot_close_are_refused_with_a_remedy() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    std::fs::write(place.path("ratios.json"), "[0.4, 0.8]").expect("written");
    for (more, code, says) in [
        ("--how lora --close-to 0.8", 2, "does not fit --how lora"),
        ("--how blocks --teacher m --train factors --close-to 0.8", 2, "leave --train out"),
        ("--how full --close-to 80", 2, "like 0.8"),
        ("--how full --close-to 4:4", 2, "N must lie between 1 and M - 1"),
        ("--how full --close-by 0.5", 2, "add --close-to 0.8"),
        ("--how full --mask-every 3", 2, "add --close-to 0.8"),
        ("--how full --close-to 0.8 --close-by 0", 2, "--close-by 0.6"),
        ("--how full --close-to 0.4", 2, "keep the mask of the model"),
        (
            "--how full --close-to 0.8 --save-masks",
            2,
            "the zeros of the trained model are its masks",
        ),
        ("--how full --close-to 0.8 --verify full", 2, "use --verify quick"),
        ("--how full --close-to 0.8 --teacher pruned/model", 1, "name the dense model"),
        ("--how blocks --close-to 0.8", 2, "train without one: --how full"),
        (
            "--how full --close-to 0.8 --layer-ratios ratios.json",
            2,
            "name a higher sparsity for this layer in the file of --layer-ratios",
        ),
        ("--how full --close-to 2:4", 2, "close to a ratio, like --close-to 0.8"),
        ("--how full --close-to 2:4 --allocate owl", 2, "fixes the sparsity of every layer"),
        ("--how full --close-to 0.8 --allocate error", 2, "use --allocate owl"),
        (
            "--how full --close-to 0.8 --allocate owl --layer-ratios ratios.json",
            2,
            "leave one of them out",
        ),
    ] {
        let ran = place.run(&format!("{COMMON} {more} --save out"));
        assert_eq!(ran.code, code, "{more}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{more}\n{}\nhas no `{says}`", ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        assert!(!place.path("out/model").exists(), "{more}");
    }
    assert_eq!(place.run("quantize --to nf4 m --save four").code, 0);
    let ran = place.run(
        &format!("{COMMON} --how full --close-to 0.8 --save out").replace("pruned/model", "four"),
    );
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("name the checkpoint before its quantisation"), "{}", ran.stderr);
}
