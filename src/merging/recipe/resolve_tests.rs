//! Tests of the tensors of an output: goldens' configurations with values worked out by hand, precedence, and models that do not fit.

use super::Parameter::{Density, Lambda, Normalize, Scale, T, Weight};
use super::testing::{method, read, shape};
use super::{ModelShape, Resolved, TensorRecipe};

/// Resolves a recipe over models of five layers.
fn resolve(text: &str) -> Resolved {
    let recipe = read(text).unwrap();
    let shapes = vec![shape(5); recipe.models().len()];
    let declaration = method(&recipe.merge_method);
    recipe.resolve(&declaration, &shapes).unwrap()
}

fn refusal(text: &str, shapes: &[ModelShape]) -> String {
    let recipe = read(text).unwrap();
    let resolved = recipe.resolve(&method(&recipe.merge_method), shapes);
    resolved.unwrap_err().to_string()
}

fn tensor<'a>(resolved: &'a Resolved, name: &str) -> &'a TensorRecipe {
    let mut tensors = resolved.tensors.iter();
    tensors.find(|tensor| tensor.name == name).unwrap()
}

/// The value of source `source` for the tensor `name` of each of the layers.
fn over_layers(
    resolved: &Resolved,
    name: &str,
    source: usize,
    parameter: super::Parameter,
) -> Vec<f64> {
    let layers = resolved.tensors.iter().filter(|tensor| {
        tensor.layer.is_some() && tensor.name.ends_with(&format!(".{name}.weight"))
    });
    layers.map(|tensor| tensor.sources[source].values.number(parameter)).collect()
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";
const O: &str = "self_attn.o_proj";
const DOWN: &str = "mlp.down_proj";
const LAYER_NORM: &str = "input_layernorm";

#[test]
fn linear_takes_gradients_behind_filters() {
    // goldens/merge/configs/linear-nonorm-gradient.yml
    let resolved = resolve(
        "merge_method: linear
models:
  - model: wiki
    parameters:
      weight:
        - {filter: self_attn, value: [0.0, 0.5, 1.0]}
        - {filter: mlp, value: [1.0, 0.25]}
        - value: 0.6
  - {model: stories, parameters: {weight: 0.5}}
parameters: {normalize: false}
",
    );
    // t = 0, 1/4, 1/2, 3/4, 1. Three points: x = 2t = 0, 0.5, 1, 1.5, 2. Two points: x = t, 1 - 0.75 t.
    assert_eq!(over_layers(&resolved, O, 0, Weight), [0.0, 0.25, 0.5, 0.75, 1.0]);
    assert_eq!(over_layers(&resolved, DOWN, 0, Weight), [1.0, 0.8125, 0.625, 0.4375, 0.25]);
    assert_eq!(over_layers(&resolved, LAYER_NORM, 0, Weight), [0.6; 5]);
    assert_eq!(over_layers(&resolved, O, 1, Weight), [0.5; 5]);
    let norm = tensor(&resolved, NORM);
    assert_eq!(norm.sources[0].values.get(Weight), Some(0.6));
    assert_eq!(norm.shared.get(Normalize), Some(0.0));
    assert_eq!((norm.layer, norm.base), (None, None));
    let names = resolved.tensors.iter().map(|tensor| tensor.name.as_str());
    let names: Vec<&str> = names.collect();
    assert_eq!(names.len(), 3 + 5 * 3);
    assert_eq!((names[0], names[16], names[17]), (EMBEDDING, NORM, HEAD));
}

#[test]
fn ties_gradients_run_over_the_layers_and_the_base_has_no_values() {
    // goldens/merge/configs/ties-lambda-gradient.yml
    let resolved = resolve(
        "merge_method: ties
base_model: base
models:
  - {model: wiki, parameters: {weight: 0.8, density: [0.9, 0.3, 0.6]}}
  - model: stories
    parameters:
      weight:
        - {filter: mlp, value: [0.2, 1.0]}
        - {filter: '*', value: 0.5}
      density: 0.4
parameters: {lambda: 1.5}
",
    );
    // x = 0, 0.5, 1, 1.5, 2 between the points 0.9, 0.3, 0.6.
    let halfway = |a: f64, b: f64| 0.5 * a + 0.5 * b;
    assert_eq!(
        over_layers(&resolved, O, 0, Density),
        [0.9, halfway(0.9, 0.3), 0.3, halfway(0.3, 0.6), 0.6]
    );
    // 0.2 (1 - t) + t for t = 0, 1/4, ... 1.
    let expected = [0.0, 0.25, 0.5, 0.75, 1.0].map(|t| (1.0 - t) * 0.2 + t);
    assert_eq!(over_layers(&resolved, DOWN, 1, Weight), expected);
    assert_eq!(over_layers(&resolved, O, 1, Weight), [0.5; 5]);
    // Outside the layers t = 0, the head included.
    for name in [EMBEDDING, NORM, HEAD] {
        let tensor = tensor(&resolved, name);
        assert_eq!(tensor.sources[0].values.get(Density), Some(0.9), "{name}");
        // The base, appended to the models; it is model 0.
        assert_eq!((tensor.base, tensor.sources[2].model), (Some(2), 0));
        assert_eq!(tensor.sources[2].values.iter().count(), 0);
        assert_eq!(tensor.shared.get(Lambda), Some(1.5));
        // The default of ties.
        assert_eq!(tensor.shared.get(Normalize), Some(1.0));
    }
}

#[test]
fn slices_have_depths_and_scopes_of_their_own() {
    // goldens/merge/configs/ties-slices.yml
    let resolved = resolve(
        "merge_method: ties
base_model: base
slices:
  - sources:
      - {model: base, layer_range: [0, 2]}
      - {model: wiki, layer_range: [0, 2], parameters: {weight: 1.0, density: 0.5}}
      - {model: stories, layer_range: [0, 2], parameters: {weight: 0.3, density: 0.7}}
  - sources:
      - {model: base, layer_range: [2, 5]}
      - {model: wiki, layer_range: [2, 5], parameters: {weight: [0.2, 1.0], density: 0.4}}
      - {model: stories, layer_range: [2, 5]}
    parameters: {weight: 0.6, density: 0.9}
parameters: {lambda: 1.1}
",
    );
    // Second slice: t = 0, 1/2, 1 over its three layers.
    assert_eq!(over_layers(&resolved, O, 1, Weight), [1.0, 1.0, 0.2, 0.5 * 0.2 + 0.5 * 1.0, 1.0]);
    assert_eq!(over_layers(&resolved, O, 1, Density), [0.5, 0.5, 0.4, 0.4, 0.4]);
    assert_eq!(over_layers(&resolved, O, 2, Weight), [0.3, 0.3, 0.6, 0.6, 0.6]);
    assert_eq!(over_layers(&resolved, O, 2, Density), [0.7, 0.7, 0.9, 0.9, 0.9]);
    let weights = |name| {
        let sources = &tensor(&resolved, name).sources;
        (sources[1].values.number(Weight), sources[2].values.number(Weight))
    };
    // The embedding has the first slice's parameters. Norm and head have the last slice's parameters, with t = 0.
    assert_eq!(weights(EMBEDDING), (1.0, 0.3));
    assert_eq!(weights(NORM), (0.2, 0.6));
    assert_eq!(weights(HEAD), (0.2, 0.6));
}

#[test]
fn slerp_positions_are_shared_and_follow_the_outputs_names() {
    // goldens/merge/configs/slerp-gradient.yml
    let resolved = resolve(
        "merge_method: slerp
base_model: stories
slices:
  - sources:
      - {model: stories, layer_range: [0, 5]}
      - {model: wiki, layer_range: [0, 5]}
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.25, 0.7]}
    - value: 0.5
",
    );
    let t = |name: &str, layer: usize| {
        let name = format!("model.layers.{layer}.{name}.weight");
        tensor(&resolved, &name).shared.number(T)
    };
    // Five points over five layers: x = 4t is the layer.
    assert_eq!([0, 1, 2, 3, 4].map(|layer| t(O, layer)), [0.0, 0.5, 0.3, 0.7, 1.0]);
    let halfway = |a: f64, b: f64| 0.5 * a + 0.5 * b;
    assert_eq!(
        [0, 1, 2, 3, 4].map(|layer| t(DOWN, layer)),
        [1.0, halfway(1.0, 0.25), 0.25, halfway(0.25, 0.7), 0.7]
    );
    assert_eq!(tensor(&resolved, EMBEDDING).shared.get(T), Some(0.5));
    assert_eq!(tensor(&resolved, NORM).base, Some(0));
}

#[test]
fn stacked_slices_count_on_and_filters_see_input_names() {
    // goldens/merge/configs/passthrough-stack.yml, with a filter on a layer of the input.
    let resolved = resolve(
        "merge_method: passthrough
slices:
  - sources: [{model: wiki, layer_range: [0, 3]}]
  - sources:
      - model: base
        layer_range: [2, 4]
        parameters:
          scale:
            - {filter: o_proj, value: 0.5}
            - {filter: down_proj, value: 0.0}
            - {filter: layers.3., value: 2.0}
  - sources: [{model: stories, layer_range: [3, 5]}]
",
    );
    let sources: Vec<(usize, &str)> = resolved
        .tensors
        .iter()
        .filter(|tensor| !tensor.name.contains("layers") || tensor.name.contains(O))
        .map(|tensor| (tensor.sources[0].model, tensor.sources[0].tensor.as_str()))
        .collect();
    let o = |layer: usize| format!("model.layers.{layer}.{O}.weight");
    let [o0, o1, o2, o3, o4] = [0, 1, 2, 3, 4].map(o);
    // Models by appearance: wiki 0, base 1, stories 2.
    assert_eq!(
        sources,
        [
            (0, EMBEDDING),
            (0, &*o0),
            (0, &*o1),
            (0, &*o2),
            (1, &*o2),
            (1, &*o3),
            (2, &*o3),
            (2, &*o4),
            (2, NORM),
            (2, HEAD),
        ]
    );
    let scale = |name: &str| {
        let layers = resolved.tensors.iter().filter(|tensor| tensor.name.contains(name));
        let scales = layers.map(|tensor| tensor.sources[0].values.get(Scale));
        scales.collect::<Vec<_>>()
    };
    let none = None;
    assert_eq!(scale(O), [none, none, none, Some(0.5), Some(0.5), none, none]);
    assert_eq!(scale(DOWN), [none, none, none, Some(0.0), Some(0.0), none, none]);
    // Layer 3 of the input is layer 4 of the output; layer 3 of the output is not meant.
    assert_eq!(scale(LAYER_NORM), [none, none, none, none, Some(2.0), none, none]);
    let recipe = read(
        "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [4, 5]}]\n- sources: [{model: a, layer_range: [0, 5]}]\n",
    );
    assert_eq!(recipe.unwrap().num_hidden_layers(&[shape(5)]).unwrap(), 6);
}

#[test]
fn a_shared_filter_sees_the_outputs_name_and_one_layer_is_at_the_end() {
    let resolved = resolve(
        "merge_method: slerp
base_model: a
slices:
  - sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [4, 5]}]
  - sources: [{model: a, layer_range: [4, 5]}, {model: b, layer_range: [0, 1]}]
parameters:
  t: [{filter: layers.1., value: [0.1, 0.9]}, {value: 0.5}]
",
    );
    let layer = |layer: usize| tensor(&resolved, &format!("model.layers.{layer}.{O}.weight"));
    assert_eq!(layer(0).shared.get(T), Some(0.5));
    // t = 1 in a slice of one layer: the last point.
    assert_eq!(layer(1).shared.get(T), Some(0.9));
    assert_eq!(layer(1).sources[1].tensor, format!("model.layers.0.{O}.weight"));
}

#[test]
fn the_narrowest_scope_with_a_value_decides() {
    // Each scope sets one kind of tensor less than the scope around it.
    let resolved = resolve(
        "merge_method: linear
modules:
  default:
    slices:
      - sources:
          - model: a
            layer_range: [0, 5]
            parameters: {weight: [{filter: o_proj, value: 1}]}
        parameters: {weight: [{filter: self_attn, value: 9}, {filter: mlp, value: 2}]}
    parameters: {weight: [{filter: layers, value: 3}]}
parameters: {weight: 4}
",
    );
    assert_eq!(over_layers(&resolved, O, 0, Weight), [1.0; 5]);
    assert_eq!(over_layers(&resolved, DOWN, 0, Weight), [2.0; 5]);
    assert_eq!(over_layers(&resolved, LAYER_NORM, 0, Weight), [3.0; 5]);
    assert_eq!(tensor(&resolved, HEAD).sources[0].values.get(Weight), Some(4.0));
}

const TWO: &str = "merge_method: linear
models: [{model: a}, {model: b}]
parameters: {weight: 1}
";

#[test]
fn required_parameters_need_a_value_for_every_tensor() {
    let text = "merge_method: linear
models:
  - model: a
    parameters: {weight: 1}
  - model: b
    parameters: {weight: [{filter: mlp, value: 1}]}
";
    assert_eq!(
        refusal(text, &[shape(2), shape(2)]),
        "`x.yml` line 5: the method `linear` needs `weight`, which has no value for `model.embed_tokens.weight` of `b`\n\
         hint: add `weight: NUMBER` to the `parameters` of the model or of the recipe"
    );
    let text =
        "merge_method: linear\nbase_model: b\nmodels: [{model: a, parameters: {weight: 1}}]\n";
    let refused = refusal(text, &[shape(2), shape(2)]);
    assert!(refused.contains("hint: `base_model` is one of the models"), "{refused}");
    let text = "merge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\n";
    let refused = refusal(text, &[shape(2), shape(2)]);
    let missing = "line 3: the method `slerp` needs `t`, which has no value for `model.embed_tokens.weight`\n";
    assert!(refused.contains(missing), "{refused}");
}

#[test]
fn layers_that_a_model_does_not_have_are_refused() {
    let text = "merge_method: passthrough\nslices:\n  - sources:\n      - {model: a, layer_range: [3, 6]}\n";
    assert_eq!(
        refusal(text, &[shape(5)]),
        "`x.yml` line 4: the layer range [3, 6] ends behind the last layer of `a`, which has 5 layers\nhint: write `layer_range: [3, 5]`"
    );
    let refused = refusal(TWO, &[shape(5), shape(4)]);
    assert!(refused.contains("the models have different numbers of layers"), "{refused}");
    assert!(refused.contains("`b`: 4 layers\nhint: write `slices`"), "{refused}");
    let many = "  - *s\n".repeat(1000);
    let text = format!(
        "merge_method: passthrough\nslices:\n  - &s {{sources: [{{model: a, layer_range: [0, 5]}}]}}\n{many}"
    );
    let refused = refusal(&text, &[shape(5)]);
    // 4096 / 5 = 819.2: slice 820 is too many; slice 1 stands on line 3.
    assert!(refused.contains("line 822: the output has more than 4096 layers"), "{refused}");
}

#[test]
fn models_with_other_tensors_or_shapes_are_refused_with_a_list() {
    let mut other = shape(2);
    other.tensors.insert("model.layers.1.self_attn.q_proj.bias".into(), vec![8]);
    assert_eq!(
        refusal(TWO, &[shape(2), other.clone()]),
        "some models have tensors that others lack\n  `a` has no `model.layers.1.self_attn.q_proj.bias`\n\
         hint: merge models with the shape of one base, such as its fine-tuned copies"
    );
    let mut all = other;
    all.tensors.insert("model.layers.0.self_attn.q_proj.bias".into(), vec![8]);
    assert_eq!(
        refusal(STACKED, &[shape(2), all]),
        "some models have tensors that others lack\n  `self_attn.q_proj.bias`: in 1 of 2 layers\n\
         hint: merge models with the shape of one base, such as its fine-tuned copies"
    );
    let mut wide = shape(2);
    let down = format!("model.layers.1.{DOWN}.weight");
    wide.tensors.insert(down, vec![8, 24]);
    assert_eq!(
        refusal(TWO, &[shape(2), wide]),
        "the models have tensors of different shapes\n  `model.layers.1.mlp.down_proj.weight` of `b` is [8, 24], \
         `model.layers.1.mlp.down_proj.weight` of `a` is [8, 16]\nhint: merge models with the shape of one base, such as its fine-tuned copies"
    );
    let mut wide = shape(2);
    for layer in 0..2 {
        wide.tensors.insert(format!("model.layers.{layer}.{DOWN}.weight"), vec![8, 24]);
    }
    let refused = refusal(STACKED, &[shape(2), wide]);
    assert!(refused.contains("the models have tensors of different shapes"), "{refused}");
    let mut none = shape(9);
    none.tensors.retain(|name, _| !name.contains("layers"));
    let refused = refusal(TWO, &[shape(9), none]);
    // 27 tensors of nine layers, ten of them listed.
    assert!(refused.contains("\n  and 17 more\n"), "{refused}");
    let mut without = shape(2);
    without.tensors.remove(NORM);
    let refused = refusal(TWO, &[shape(2), without]);
    assert!(refused.contains("`b` has no `model.norm.weight`"), "{refused}");
}

/// A layer of each of two models.
const STACKED: &str = "merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 1]}]
  - sources: [{model: b, layer_range: [1, 2]}]
";

#[test]
fn layers_of_a_model_may_differ_in_kind() {
    // Layer 1 has a bias and a narrower matrix, as a dense layer among layers of experts.
    let mut hybrid = shape(2);
    hybrid.tensors.insert("model.layers.1.self_attn.q_proj.bias".into(), vec![8]);
    hybrid.tensors.insert(format!("model.layers.1.{DOWN}.weight"), vec![8, 4]);
    let alone = read("merge_method: passthrough\nmodels: [{model: a}]\n").unwrap();
    let resolved = alone.resolve(&method("passthrough"), std::slice::from_ref(&hybrid)).unwrap();
    assert_eq!(resolved.tensors.len(), hybrid.tensors.len());
    let both = read(TWO).unwrap();
    assert!(both.resolve(&method("linear"), &[hybrid.clone(), hybrid.clone()]).is_ok());
    // A layer of one kind is not merged with a layer of the other.
    let crossed = "merge_method: linear
slices:
  - sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [1, 2]}]
parameters: {weight: 1}
";
    let refused = refusal(crossed, &[hybrid.clone(), hybrid]);
    assert!(refused.contains("`a` has no `model.layers.0.self_attn.q_proj.bias`"), "{refused}");
}

#[test]
fn a_slice_of_no_layers_chooses_norm_and_head() {
    let text = "merge_method: linear
slices:
  - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2]}]
  - sources: [{model: b, layer_range: [2, 2]}]
parameters: {weight: 1}
";
    let recipe = read(text).unwrap();
    let resolved = recipe.resolve(&method("linear"), &[shape(2), shape(2)]).unwrap();
    for tensor in &resolved.tensors {
        let models: Vec<usize> = tensor.sources.iter().map(|source| source.model).collect();
        let is_of_last = [NORM, HEAD].contains(&&*tensor.name);
        assert_eq!(models, if is_of_last { vec![1] } else { vec![0, 1] }, "{}", tensor.name);
    }
    assert_eq!(resolved.tensors.len(), shape(2).tensors.len());
    let none =
        "merge_method: passthrough\nslices:\n  - sources: [{model: a, layer_range: [2, 2]}]\n";
    assert!(refusal(none, &[shape(2)]).contains("the output has no layers"));
}

#[test]
fn vocabularies_may_differ_in_rows_only() {
    let recipe = read(TWO).unwrap();
    let mut more = shape(2);
    more.tensors.insert(EMBEDDING.into(), vec![40, 8]);
    more.tensors.insert(HEAD.into(), vec![40, 8]);
    let linear = method("linear");
    assert!(recipe.resolve(&linear, &[shape(2), more.clone()]).is_ok());
    more.tensors.insert(HEAD.into(), vec![40, 9]);
    let refused = refusal(TWO, &[shape(2), more]);
    assert!(refused.contains("`lm_head.weight` of `b` is [40, 9]"), "{refused}");
}

#[test]
fn a_head_is_tied_where_it_is_the_embedding_of_the_output() {
    let recipe = read(TWO).unwrap();
    let linear = method("linear");
    let mut tied = shape(2);
    tied.tie_word_embeddings = true;
    // The stored head of a tied model is not used.
    let resolved = recipe.resolve(&linear, &[tied.clone(), tied.clone()]).unwrap();
    assert!(resolved.tensors.iter().all(|tensor| tensor.name != HEAD));
    assert_eq!(resolved.left_out.iter().collect::<Vec<_>>(), [HEAD]);
    // Next to an untied model, the embedding of a tied model stands in for the tied model's head.
    for shapes in [[shape(2), tied.clone()], [tied.clone(), shape(2)]] {
        let resolved = recipe.resolve(&linear, &shapes).unwrap();
        let head = resolved.tensors.last().unwrap();
        assert_eq!(head.name, HEAD);
        assert!(head.sources.iter().all(|source| source.tensor == HEAD));
    }
    // A filter by name does not untie.
    let filtered = "merge_method: linear\nmodels:\n- {model: a, parameters: {weight: [{filter: embed_tokens, value: 3}, {value: 1}]}}\n\
        - {model: b, parameters: {weight: 1}}";
    let resolved = read(filtered).unwrap();
    let resolved = resolved.resolve(&linear, &[tied.clone(), tied.clone()]).unwrap();
    assert!(resolved.tensors.iter().all(|tensor| tensor.name != HEAD));
    // A stack has the embedding of its first model. Its head is the embedding of its last model, so it is tied if they are the same model.
    let stack = "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 2]}]\n- sources: [{model: MODEL, layer_range: [1, 2]}]";
    for (model, shapes, is_tied) in [
        ("a", vec![tied.clone()], true),
        ("b", vec![tied.clone(), tied.clone()], false),
        ("b", vec![shape(2), tied.clone()], false),
    ] {
        let recipe = read(&stack.replace("MODEL", model)).unwrap();
        let resolved = recipe.resolve(&method("passthrough"), &shapes).unwrap();
        let head = resolved.tensors.iter().find(|tensor| tensor.name == HEAD);
        assert_eq!(head.is_none(), is_tied, "{model}");
        if let Some(head) = head {
            assert_eq!(head.sources[0].model, 1);
        }
    }
}

#[test]
fn tensors_that_are_no_part_of_a_decoder_are_left_out() {
    let mut old = shape(2);
    let names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.eh_proj.weight",
        "model.rotary_emb.inv_freq",
        "vision.patch.weight",
    ];
    for name in names {
        old.tensors.insert(name.into(), vec![4]);
    }
    let recipe = read(TWO).unwrap();
    let resolved = recipe.resolve(&method("linear"), &[old, shape(2)]).unwrap();
    assert_eq!(resolved.left_out.iter().collect::<Vec<_>>(), names);
    assert_eq!(resolved.tensors.len(), 3 + 2 * 3);
}
