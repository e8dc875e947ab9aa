//! A file for `--layer-ratios`, held against a model of three layers.
#![no_main]

use std::sync::LazyLock;

use prune::model::ModelConfig;
use prune::pipeline::{LayerRatios, Selection, TargetPlan};

static CONFIG: LazyLock<ModelConfig> = LazyLock::new(|| {
    let folder = prune_fuzz::put("m/eos", b"");
    ModelConfig::load(folder.parent().expect("the model's folder")).expect("a good config")
});

prune_fuzz::target!(input, {
    if let Ok(ratios) = LayerRatios::load(&prune_fuzz::put("ratios.json", input)) {
        let selection = Selection {
            sparsity_ratio: Some(0.5),
            layer_ratios: Some(ratios),
            ..Selection::default()
        };
        let method = prune::pruning::method("wanda").expect("it is in the table");
        if let Ok(plan) = TargetPlan::resolve(&selection, method, &CONFIG) {
            let _ = plan.describe();
        }
    }
});
