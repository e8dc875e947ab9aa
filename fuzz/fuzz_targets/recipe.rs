//! A recipe of `prune merge`: what is read can be written, read again, and resolved over small models.
#![no_main]

use std::collections::BTreeMap;

use prune::merging::recipe::{BaseModel, Declaration, ModelShape, Parameter, Recipe, WhenMissing};

/// A method with a base and parameters of both kinds, and one without.
const METHODS: &[Declaration] = &[
    Declaration {
        name: "ties",
        base_model: BaseModel::Required,
        models: 1..=usize::MAX,
        per_model: &[
            (Parameter::Weight, WhenMissing::Required),
            (Parameter::Density, WhenMissing::Is(1.0)),
        ],
        shared: &[
            (Parameter::Normalize, WhenMissing::Is(1.0)),
            (Parameter::Lambda, WhenMissing::Is(1.0)),
        ],
    },
    Declaration {
        name: "passthrough",
        base_model: BaseModel::Optional,
        models: 1..=1,
        per_model: &[(Parameter::Scale, WhenMissing::Absent)],
        shared: &[],
    },
];

/// A model of five layers with one tensor each.
fn shape() -> ModelShape {
    let layer = |layer| (format!("model.layers.{layer}.mlp.up_proj.weight"), vec![4, 4]);
    let mut tensors: BTreeMap<String, Vec<usize>> = (0..5).map(layer).collect();
    for (name, shape) in [
        ("model.embed_tokens.weight", vec![8, 4]),
        ("model.norm.weight", vec![4]),
        ("lm_head.weight", vec![8, 4]),
    ] {
        tensors.insert(name.into(), shape);
    }
    ModelShape { num_hidden_layers: 5, tie_word_embeddings: false, tensors }
}

prune_fuzz::target!(input, {
    prune_fuzz::expect_blame();
    let text = String::from_utf8_lossy(input);
    let Ok(recipe) = Recipe::from_yaml(&text, "recipe.yml", METHODS) else {
        return;
    };
    let written = recipe.to_yaml(str::to_string);
    let again = Recipe::from_yaml(&written, "written.yml", METHODS).expect("it was just written");
    assert_eq!(again, recipe, "{written}");
    let shapes = vec![shape(); recipe.models().len()];
    let declaration = METHODS.iter().find(|method| method.name == recipe.merge_method);
    let _ = recipe.resolve(declaration.expect("it was read"), &shapes);
});
