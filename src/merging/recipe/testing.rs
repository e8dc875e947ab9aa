//! Declarations of mergekit's methods and shapes of small models, for tests.

use std::collections::BTreeMap;

use super::Parameter::{
    Density, Eps, Epsilon, FilterWise, Gamma, Lambda, MaxIter, Normalize, NormalizeWeights,
    NuslerpFlatten, NuslerpRowWise, Rescale, Scale, SelectTopk, T, Tol, Weight,
};
use super::WhenMissing::{Absent, Is, Required};
use super::{BaseModel, Declaration, Declared, ModelShape, Recipe};

const DIFFERENCES: &[Declared] = &[(Weight, Required), (Density, Is(1.0))];
const WITH_GAMMA: &[Declared] = &[(Weight, Required), (Density, Is(1.0)), (Gamma, Is(0.01))];
const WITH_EPSILON: &[Declared] = &[(Weight, Required), (Density, Is(1.0)), (Epsilon, Is(0.15))];
const SHARED: &[Declared] = &[(Normalize, Is(0.0)), (Rescale, Is(0.0)), (Lambda, Is(1.0))];
const TIES: &[Declared] = &[(Normalize, Is(1.0)), (Rescale, Is(0.0)), (Lambda, Is(1.0))];

/// The methods of the configurations in `goldens/merge` that this version has.
pub(super) fn methods() -> Vec<Declaration> {
    let of = |name, per_model, shared| Declaration {
        name,
        base_model: BaseModel::Required,
        models: 1..=usize::MAX,
        per_model,
        shared,
    };
    let without_base = |name, models, per_model, shared| Declaration {
        base_model: BaseModel::Optional,
        models,
        ..of(name, per_model, shared)
    };
    let origin = |name, models, shared| Declaration {
        base_model: BaseModel::Origin,
        models,
        ..of(name, &[(Weight, Required)], shared)
    };
    vec![
        without_base("linear", 1..=usize::MAX, &[(Weight, Required)], &[(Normalize, Is(1.0))]),
        Declaration { models: 2..=2, ..of("slerp", &[], &[(T, Required)]) },
        of("task_arithmetic", DIFFERENCES, SHARED),
        of("ties", DIFFERENCES, TIES),
        of("dare_linear", DIFFERENCES, SHARED),
        of("dare_ties", DIFFERENCES, SHARED),
        of("della", WITH_EPSILON, SHARED),
        of("della_linear", WITH_EPSILON, SHARED),
        of("breadcrumbs", WITH_GAMMA, SHARED),
        of("breadcrumbs_ties", WITH_GAMMA, SHARED),
        Declaration { models: 3..=usize::MAX, ..of("model_stock", &[], &[(FilterWise, Is(0.0))]) },
        without_base("passthrough", 1..=1, &[(Scale, Absent)], &[]),
        without_base("karcher", 1..=usize::MAX, &[], &[(MaxIter, Is(10.0)), (Tol, Is(1e-5))]),
        of("sce", &[], &[(SelectTopk, Is(1.0))]),
        origin("nuslerp", 2..=2, &[(NuslerpRowWise, Is(0.0)), (NuslerpFlatten, Is(1.0))]),
        origin("multislerp", 1..=usize::MAX, &[(NormalizeWeights, Is(1.0)), (Eps, Is(1e-8))]),
    ]
}

/// The declaration of a method above.
pub(super) fn method(name: &str) -> Declaration {
    let mut methods = methods().into_iter();
    methods.find(|method| method.name == name).unwrap()
}

/// Reads a recipe of the file `x.yml`.
pub(super) fn read(text: &str) -> Result<Recipe, String> {
    Recipe::from_yaml(text, "x.yml", &methods()).map_err(|error| error.to_string())
}

/// A model of `layers` layers with three tensors each, and a head.
pub(super) fn shape(layers: usize) -> ModelShape {
    let mut tensors = BTreeMap::from([
        ("model.embed_tokens.weight".to_string(), vec![32, 8]),
        ("model.norm.weight".to_string(), vec![8]),
        ("lm_head.weight".to_string(), vec![32, 8]),
    ]);
    for layer in 0..layers {
        for (name, shape) in [
            ("self_attn.o_proj", vec![8, 8]),
            ("mlp.down_proj", vec![8, 16]),
            ("input_layernorm", vec![8]),
        ] {
            tensors.insert(format!("model.layers.{layer}.{name}.weight"), shape);
        }
    }
    ModelShape { num_hidden_layers: layers, tie_word_embeddings: false, tensors }
}
