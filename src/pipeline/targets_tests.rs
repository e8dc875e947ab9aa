//! Targets from flags: what is chosen, and what is refused.

use super::*;
use crate::pruning::METHODS;
use serde_json::json;

fn config() -> ModelConfig {
    ModelConfig::from_json(
        &json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
        "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 512}),
    )
    .unwrap()
}

fn resolve(selection: Selection) -> Result<TargetPlan> {
    TargetPlan::resolve(&selection, METHODS[0], &config())
}

fn half() -> Selection {
    Selection { sparsity_ratio: Some(0.5), ..Selection::default() }
}

#[test]
fn everything_is_chosen_unless_globs_say_otherwise() {
    assert_eq!(resolve(half()).unwrap().matrices(), 21);
    let plan = resolve(Selection {
        include: vec!["mlp.*".into()],
        exclude: vec!["model.layers.2.*".into()],
        ..half()
    })
    .unwrap();
    assert_eq!(
        plan.describe(),
        ["6 of 21 matrices:", "  layers 0-1: gate_proj up_proj down_proj", "  layer 2: nothing"]
    );
    let plan = resolve(Selection { include: vec!["q_proj".into()], ..half() }).unwrap();
    assert_eq!(plan.matrices(), 3);
    let tensors = [0, 1, 2].map(|layer| LinearId::Q.tensor_name(layer));
    assert_eq!(plan.tensors(), tensors);
}

#[test]
fn contradictions_are_usage_errors_that_say_what_to_type() {
    assert_eq!(check_ratio("x", -0.0).unwrap().to_bits(), 0);
    let refusals = [
        (Selection { sparsity_ratio: Some(1.0), ..half() }, "--sparsity-ratio is 1;"),
        (Selection { sparsity_ratio: Some(50.0), ..half() }, "for 50 percent write 0.5"),
        (Selection { sparsity_ratio: None, ..half() }, "--sparsity-ratio is missing"),
        (
            Selection { sparsity_type: Pattern::NOfM { n: 1, m: 4 }, ..half() },
            "contradicts --sparsity-type 1:4, which removes 0.25",
        ),
        (
            Selection { include: vec!["q_prj".into()], ..half() },
            "--include `q_prj` matches no matrix",
        ),
        (Selection { exclude: vec!["*".into()], ..half() }, "leave no matrix to prune"),
        (
            Selection { layer_ratios: Some(LayerRatios::All(vec![0.5])), ..half() },
            "has 1 ratios, the model 3 layers",
        ),
        (
            Selection { layer_ratios: Some(LayerRatios::Some(vec![(3, 0.5)])), ..half() },
            "names layer 3, the model has layers 0 to 2",
        ),
    ];
    for (selection, message) in refusals {
        let error = resolve(selection).unwrap_err();
        assert!(error.downcast_ref::<Failure>().is_some_and(|failure| failure.is_usage), "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn a_group_that_does_not_divide_names_the_matrix_before_anything_runs() {
    let error = resolve(Selection { sparsity_type: Pattern::NOfM { n: 4, m: 8 }, ..half() })
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(
            "`model.layers.0.mlp.down_proj` has 172 input features, which 8 does not divide"
        ),
        "{error}"
    );
    let without = Selection {
        sparsity_type: Pattern::NOfM { n: 4, m: 8 },
        exclude: vec!["*down_proj".into()],
        ..half()
    };
    assert_eq!(resolve(without).unwrap().matrices(), 18);
}

#[test]
fn layer_ratios_come_as_a_list_or_for_some_layers() {
    let folder = tempfile::tempdir().unwrap();
    let load = |text: &str| {
        let path = folder.path().join("ratios.json");
        std::fs::write(&path, text).unwrap();
        LayerRatios::load(&path)
    };
    let plan = resolve(Selection { layer_ratios: Some(load("{\"1\": 0.25}").unwrap()), ..half() })
        .unwrap();
    assert_eq!(plan.uneven_ratios(), Some(vec![0.5, 0.25, 0.5]));
    let all = load("[0.1, 0.2, 0.3]").unwrap();
    let plan =
        resolve(Selection { sparsity_ratio: None, layer_ratios: Some(all), ..half() }).unwrap();
    assert_eq!(plan.of(2, LinearId::Q).map(|target| target.ratio), Some(0.3));
    for text in ["3", "{\"x\": 0.5}", "[\"a\"]", "{"] {
        assert!(
            load(text).unwrap_err().to_string().contains("does not hold layer ratios"),
            "{text}"
        );
    }
}
