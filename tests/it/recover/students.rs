//! Students with fewer layers or less width than their teacher.

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::run::Manifest;
use prune::synthetic::RandomCheckpoint;

use crate::support::{Place, edit_json};

const TRAIN: &str = "recover --dataset train.txt --eval-dataset test.txt --seqlen 64 --eval-windows 3 --steps 8 \
    --schedule constant --lr 3e-4";

/// A dense model `m` of four layers, and what a command makes of it in `small`.
fn student(drops: &str) -> Place {
    let place =
        Place::with(&RandomCheckpoint { num_hidden_layers: 4, ..RandomCheckpoint::default() });
    place.prune(&format!("--model m {drops} --eval none --save small"));
    place
}

fn recovered(place: &Place, more: &str) -> Manifest {
    let line = format!("{TRAIN} --model small/model {more} --save out --force");
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
    let manifest = place.manifest("out");
    assert_eq!(manifest.exceeded_plan(), Vec::<String>::new(), "{line}");
    manifest
}

/// The losses of all steps.
fn losses(manifest: &Manifest) -> Vec<f64> {
    let recovery = manifest.recovery.as_ref().expect("a recovery");
    recovery.steps.iter().map(|step| step.loss).collect()
}

#[test]
fn a_teacher_with_more_layers_or_width_is_learned_from() {
    for drops in ["--layers-dropped 1,2", "--drop-width 0.5"] {
        let place = student(drops);
        for how in ["--how lora --rank 4", "--how full", "--how full --max-memory cpu=40MiB"] {
            let alone = losses(&recovered(&place, how));
            let unheard =
                losses(&recovered(&place, &format!("{how} --teacher m --distill-weight 0")));
            assert!(
                (alone[0] - unheard[0]).abs() < 1e-5 * alone[0],
                "{how}: the loss of the tokens"
            );
            let taught =
                losses(&recovered(&place, &format!("{how} --teacher m --distill-weight 1")));
            // A random model hardly changes with its width, so there is nothing to learn.
            let falls = drops.contains("width") || taught[7] < 0.7 * taught[0];
            assert!(falls, "{drops} {how}: {taught:?}");
        }
    }
}

#[test]
fn blocks_learn_from_the_layers_that_were_dropped_too() {
    let place = student("--layers-dropped 1,2");
    let of =
        |how: &str| recovered(&place, &format!("--how blocks --nsamples 16 --teacher m {how}"));
    let manifest = of("");
    let blocks = |manifest: &Manifest| -> Vec<_> {
        let layers = manifest.layers.iter();
        layers.map(|layer| layer.training.clone().expect("a loss")).collect()
    };
    assert_eq!(blocks(&manifest).len(), 2);
    // The first layer stands for the dense layers 0 to 2, the second for its own layer.
    assert!(blocks(&manifest).iter().all(|block| block.last < block.first));
    let on_disk = of("--hidden-states disk --threads 1");
    assert_eq!(blocks(&on_disk), blocks(&manifest));
    // Without the record of the drop nobody knows the layers.
    std::fs::remove_file(place.path("small/model/pruning.json")).expect("removed");
    let line = format!("{TRAIN} --model small/model --how blocks --teacher m --save none");
    let ran = place.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("num_hidden_layers is 4 there, 2 here"), "{}", ran.stderr);
}

#[test]
fn vocabularies_may_be_padded_and_must_have_the_same_tokens() {
    let place = student("--layers-dropped 1");
    let vocab_size = RandomCheckpoint::default().vocab_size;
    let padded = RandomCheckpoint { vocab_size: vocab_size + 37, ..RandomCheckpoint::default() };
    place.checkpoint("padded", &padded);
    let manifest = recovered(&place, "--how full --teacher padded --distill-weight 0.5");
    assert!(losses(&manifest).iter().all(|loss| loss.is_finite()));
    // And a student with more rows than its teacher.
    place.prune("--model padded --sparsity-ratio 0.5 --eval none --save small --force");
    recovered(&place, "--how full --teacher m --distill-weight 0.5");
    place.checkpoint("other", &RandomCheckpoint::default());
    edit_json(&place.path("other/tokenizer.json"), |json| {
        let vocab = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
        let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
        (vocab["a"], vocab["b"]) = (b, a);
    });
    let ran =
        place.run(&format!("{TRAIN} --model small/model --how full --teacher other --save none"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("has other tokens than the model"), "{}", ran.stderr);
    assert!(!place.path("none").exists());
}

#[test]
fn the_memory_of_a_larger_teacher_is_planned() {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 128,
        intermediate_size: 2048,
        num_hidden_layers: 3,
        dtype: StoredDtype::F32,
        ..RandomCheckpoint::default()
    });
    place.prune("--model m --drop-width 0.9 --eval none --save small");
    let alone = recovered(&place, "--how full --eval none");
    let taught = recovered(&place, "--how full --teacher m --eval none");
    let planned = |manifest: &Manifest| {
        manifest.plan.as_ref().and_then(|plan| plan.cpu()).expect("a CPU").peak
    };
    let layer = ByteSize::of(3 * 128 * 2048, 4);
    assert!(planned(&taught) >= planned(&alone) + layer, "a dense layer is in the plan");
}
