//! Tests of reading and writing recipes.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::testing::{method, methods, read};
use super::*;
use crate::input::InOrder;
use crate::linalg::StoredDtype;

fn model(text: &str) -> ModelSpec {
    text.parse().unwrap()
}

/// The error of a recipe with the given rest: two models for `ties`.
fn refusal(rest: &str) -> String {
    let text = format!(
        "merge_method: ties\nbase_model: base\nmodels: [{{model: a, parameters: {{weight: 1}}}}]\n{rest}"
    );
    read(&text).unwrap_err()
}

#[test]
fn every_configuration_of_the_goldens_is_read() {
    let shared =
        std::env::var_os("PRUNE_SHARED").map_or_else(|| PathBuf::from("../shared"), PathBuf::from);
    let Ok(folder) = fs::read_dir(shared.join("goldens/merge/configs")) else {
        return;
    };
    let mut count = 0;
    for entry in folder {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yml") {
            continue;
        }
        count += 1;
        for recipe in Recipe::load(&path, &methods()).unwrap() {
            let written = recipe.to_yaml(str::to_string);
            assert_eq!(read(&written), Ok(recipe), "{}\n{written}", path.display());
        }
    }
    assert!(count >= 30, "{count}");
}

#[test]
fn a_recipe_holds_what_the_file_says() {
    let recipe = read(
        "merge_method: ties
base_model: owner/base@v1
models:
  - model: a+lora@main
    parameters:
      weight: 1e-3
      density: [0.9, 0.3]
  - model: {model: {path: x+y, revision: z}, lora: other}
    parameters:
      weight:
        - {filter: mlp, value: 0.5}
        - {filter: '*', value: 1}
parameters: {normalize: off, int8_mask: yes}
dtype: torch.bfloat16
out_dtype: fp32
tokenizer:
  tokens:
    <|user|>: {source: {kind: model_token, model: a, token: </s>}}
    '7': {source: {kind: model_token, model: a, token_id: 7}, force: true}
    x: {source: {kind: zero}}
    'y': {source: b@c}
    z:
      force: false
  pad_to_multiple_of: 8
chat_template: auto
",
    )
    .unwrap();
    assert_eq!(recipe.base_model, Some(model("owner/base@v1")));
    let MergeInputs::Models(inputs) = &recipe.inputs else { panic!("models") };
    assert_eq!(inputs[0].model, model("a+lora@main"));
    assert_eq!(inputs[1].model.model, "x+y");
    assert_eq!(inputs[1].model.revision.as_deref(), Some("z"));
    assert_eq!(inputs[1].model.adapter, Some(("other".into(), None)));
    let weight = inputs[0].parameters.get(Parameter::Weight).unwrap();
    assert_eq!(weight.at("x", 0.3, false), Some(0.001));
    assert_eq!(weight.place.to_string(), "`x.yml` line 6");
    let weight = inputs[1].parameters.get(Parameter::Weight).unwrap();
    assert_eq!(weight.cases[0].filter.as_deref(), Some("mlp"));
    assert_eq!(weight.cases[1].filter, None);
    let normalize = recipe.parameters.get(Parameter::Normalize).unwrap();
    assert_eq!(normalize.at("x", 0.0, true), Some(0.0));
    assert_eq!(recipe.dtype, Some(StoredDtype::Bf16));
    assert_eq!(recipe.out_dtype, Some(StoredDtype::F32));
    let tokenizer = recipe.tokenizer.as_ref().unwrap();
    assert_eq!(tokenizer.source, TokenizerSource::Union);
    let row = |source, force| TokenRecipe { source, force };
    let token = |name| TokenRow::Token(model("a"), name);
    assert_eq!(
        tokenizer.tokens.0,
        [
            ("<|user|>".into(), row(Some(token(TokenName::Text("</s>".into()))), false)),
            ("7".into(), row(Some(token(TokenName::Id(7))), true)),
            ("x".into(), row(Some(TokenRow::Zero), false)),
            ("y".into(), row(Some(TokenRow::Model(model("b@c"))), false)),
            ("z".into(), row(None, false)),
        ]
    );
    assert_eq!(tokenizer.pad_to_multiple_of, Some(8));
    let [base, a, x] = recipe.models().try_into().unwrap();
    assert_eq!((base, a), (model("owner/base@v1"), model("a+lora@main")));
    assert_eq!(x.to_string(), "x+y@z+other");
    let written = recipe.to_yaml(str::to_string);
    assert_eq!(read(&written), Ok(recipe), "{written}");
}

#[test]
fn modules_hold_slices_and_a_scope() {
    let text = "merge_method: passthrough
modules:
  default:
    slices:
      - sources: [{model: a, layer_range: [0, 2]}]
      - sources: [{model: b, layer_range: [1, 4], parameters: {scale: 2}}]
        parameters: {scale: 3}
    parameters: {scale: 4}
parameters: {scale: 5}
";
    let recipe = read(text).unwrap();
    let scale =
        |parameters: &Parameters| parameters.get(Parameter::Scale).unwrap().cases[0].points[0];
    assert_eq!(scale(&recipe.module_parameters), 4.0);
    assert_eq!(scale(&recipe.parameters), 5.0);
    let MergeInputs::Slices(slices) = &recipe.inputs else { panic!("slices") };
    assert_eq!(slices[1].sources[0].layer_range, 1..4);
    let written = recipe.to_yaml(str::to_string);
    assert_eq!(read(&written), Ok(recipe), "{written}");
}

#[test]
fn published_recipes_hold_no_folders_of_the_machine() {
    let runs = tempfile::tempdir().unwrap();
    let run = runs.path().join("first");
    std::fs::create_dir_all(run.join("model")).unwrap();
    std::fs::write(run.join("run.json"), "").unwrap();
    let text = "merge_method: linear
models:
  - {model: /home/me/a+../loras/b, parameters: {weight: 1}}
  - {model: owner/name@v1, parameters: {weight: 1}}
  - {model: x/y/z, parameters: {weight: 1}}
  - {model: RUN/model, parameters: {weight: 1}}
  - {model: /home/me/model, parameters: {weight: 1}}
";
    let recipe = read(&text.replace("RUN", &run.display().to_string())).unwrap();
    let written = recipe.to_yaml(without_folders);
    let MergeInputs::Models(inputs) = read(&written).unwrap().inputs else { panic!("models") };
    let names: Vec<String> = inputs.iter().map(|input| input.model.to_string()).collect();
    assert_eq!(names, ["a+b", "owner/name@v1", "z", "first", "model"]);
}

/// Checks the errors of recipes that end with these lines.
fn refuses(cases: &[(&str, &str)]) {
    for (rest, error) in cases {
        let found = refusal(rest);
        assert!(found.contains(error), "{rest}: {found}");
    }
}

#[test]
fn unknown_keys_and_wrong_kinds_are_refused_with_their_line() {
    refuses(&[
        ("parmeters: {}", "line 4: `parmeters` is not known here"),
        ("parmeters: {}", "hint: write `parameters`"),
        ("parmeters: {}", "known here: `name`, `merge_method`, `base_model`, `models`"),
        ("nmae: x", "hint: write `name`"),
        ("parameters: {lamda: 1}", "line 4: `lamda` is not known here"),
        ("parameters: {lamda: 1}", "hint: write `lambda`"),
        ("parameters: [1]", "line 4: expected a map of keys and values"),
        ("parameters: {lambda: x}", "line 4: expected a number (finite, decimal), true, false"),
        ("parameters: {lambda: true}", "line 4: `lambda` must be a number, found `true`"),
        ("parameters:\n  lambda:\n", "line 5: expected a number (finite, decimal)"),
        ("parameters: {lambda: .nan}", "line 4: non-finite float `.nan`"),
        ("parameters: {lambda: []}", "line 4: `lambda` is an empty list"),
        ("parameters: {lambda: [1, [2]]}", "line 4: expected a number (finite, decimal)"),
        ("parameters: {lambda: [{value: 1}, 2]}", "or a list of {filter: TEXT, value: VALUE}"),
        ("parameters: {lambda: [{vaule: 1}]}", "line 4: expected a number (finite, decimal)"),
        ("parameters: {lambda: [{filter: x}]}", "line 4: expected a number (finite, decimal)"),
        ("parameters: {density: 1.5}", "line 4: `density` is 1.5; it lies between 0 and 1"),
        (
            "parameters:\n  density:\n    - 0.5\n    - -1",
            "line 6: `density` is -1; it lies between 0 and 1",
        ),
        ("parameters: {normalize: 2}", "line 4: `normalize` must be true or false, found `2`"),
    ]);
}

#[test]
fn wrong_dtypes_tokenizers_and_templates_are_refused_with_their_line() {
    refuses(&[
        (
            "dtype: float64",
            "line 4: a dtype must be `float32`, `float16` or `bfloat16`, found `float64`",
        ),
        (
            "tokenizer_source: base\ntokenizer: {source: base}",
            "line 4: `tokenizer_source` and `tokenizer` exclude one another",
        ),
        (
            "tokenizer: {pad_to_multiple_of: 0}",
            "line 4: `pad_to_multiple_of` must be a number from 1 to 65536",
        ),
        (
            "tokenizer: {tokens: {x: {source: {kind: model_token, model: a}}}}",
            "needs `token` or `token_id`, not both",
        ),
        (
            "tokenizer: {tokens: {x: {source: {kind: other}}}}",
            "line 4: expected a token's source: a model, {kind: zero}",
        ),
        (
            "tokenizer: {tokens: {x: {source: {kind: zero, model: a}}}}",
            "line 4: expected a token's source: a model, {kind: zero}",
        ),
        ("chat_template: 7", "line 4: expected text, found `7`"),
        ("chat_template: 7", "hint: write it in quotes: \"7\""),
        ("slices: []", "a recipe holds exactly one of `models`, `slices` and `modules`"),
    ]);
}

#[test]
fn methods_models_and_slices_that_do_not_fit_are_refused() {
    let slices = |sources: &str| {
        format!(
            "merge_method: linear\nslices:\n  - sources: [{sources}]\nparameters: {{weight: 1}}\n"
        )
    };
    let models = |method: &str, rest: &str| {
        format!("merge_method: {method}\nmodels: [{{model: a}}, {{model: b}}]\n{rest}\n")
    };
    for (text, error) in [
        ("- 1".to_string(), "line 1: expected a map of keys and values"),
        ("models: [{model: a}]".into(), "line 1: missing field `merge_method`"),
        (models("ram", ""), "line 1: the method `ram` does not exist in this version"),
        (models("tise", ""), "hint: write `ties`"),
        (models("tise", ""), "line 1: no merge method is called `tise`"),
        (models("ties", ""), "line 2: the method `ties` needs a base model\nhint: add `base_model: MODEL`"),
        (models("slerp", "base_model: c"), "line 2: the method `slerp` merges 2 models, found 3\n  `a`, `b`, `c`\nhint: leave models out"),
        (models("model_stock", "base_model: a"), "the method `model_stock` merges at least 3 models, found 2"),
        ("merge_method: linear\nmodels:\n- model: a\n- model: a\n".into(), "line 4: `a` is merged with itself"),
        ("merge_method: linear\nmodels:\n- model: a+b+c\n".into(), "line 3: `a+b+c` does not name a model: it holds more than one `+`"),
        ("merge_method: linear\nmodels:\n- {modle: a}\n".into(), "hint: write `model`"),
        ("merge_method: linear\nmodels: []\n".into(), "line 1: a recipe holds exactly one of `models`, `slices` and `modules`\n  a module holds one of `models` and `slices`; none of the lists is empty"),
        ("merge_method: linear\nmodules: {vision: {}}\n".into(), "line 2: `vision` is not known here"),
        (slices("{model: a}"), "line 3: missing field `layer_range`"),
        (slices("{model: a, layer_range: [0]}"), "line 3: the layer range [0] is not [first layer, layer after the last]"),
        (slices("{model: a, layer_range: [-1, 2]}"), "line 3: expected a whole number from 0 on"),
        (slices("{model: a, layer_range: [3, 2]}"), "line 3: the layer range [3, 2] is not [first layer, layer after the last]\nhint: write `layer_range: [2, 3]`"),
        (slices("{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 3]}"), "line 3: the sources of a slice have different numbers of layers: 2 of `a`, 3 of `b`"),
        ("merge_method: slerp\nbase_model: c\nslices:\n- sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [0, 1]}]\n".into(), "line 4: the base model `c` is no source of this slice"),
    ] {
        let found = read(&text).unwrap_err();
        assert!(found.contains(error), "{text}: {found}");
    }
}

#[test]
fn keys_that_a_method_ignores_are_left_out_with_a_warning() {
    let recipe = read(
        "merge_method: slerp
base_model: a
models:
  - model: a
  - model: b
    parameters: {weight: [2, 1], t: 1}
parameters:
  normalize: true
  t: 0.5
  int8_mask: true
name: x
",
    )
    .unwrap();
    assert_eq!(
        recipe.ignored,
        [
            "`x.yml` line 8: the method `slerp` ignores `normalize`, which is a parameter of other methods",
            "`x.yml` line 6: the method `slerp` ignores `weight`, which is a parameter of other methods",
            "`x.yml` line 6: the method `slerp` ignores `t`, in the scope of a model: move it to the `parameters` of the slice or of the recipe",
        ]
    );
    let MergeInputs::Models(inputs) = &recipe.inputs else { panic!("models") };
    assert!(inputs.iter().all(|input| input.parameters.is_empty()));
    assert!(recipe.parameters.get(Parameter::Normalize).is_none());
    // The written recipe is without them.
    let again = read(&recipe.to_yaml(str::to_string)).unwrap();
    assert!(again.ignored.is_empty() && again.parameters == recipe.parameters);
    // A filter and a range are checked all the same, and typos stay refused.
    let typo = "merge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\nparameters: {t: 0.5, normalise: true}\n";
    assert!(read(typo).unwrap_err().contains("hint: write `normalize`"));
}

#[test]
fn recipes_of_a_file_read_one_another_by_name() {
    let one = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n";
    let all = |text: &str| {
        Recipe::all_from_yaml(text, "x.yml", &methods()).map_err(|error| error.to_string())
    };
    let two = "merge_method: ties\nbase_model: first\nmodels:\n- model: first+lora\n  parameters: {weight: 1}\ntokenizer_source: first\n";
    let mut recipes = all(&format!("name: first\n{one}---\n{two}")).unwrap();
    assert_eq!(recipes[0].name.as_deref(), Some("first"));
    let mut last = recipes.pop().unwrap();
    last.read_from("first", std::path::Path::new("out/merges/first/model"));
    let [base, with_adapter] = last.models().try_into().unwrap();
    assert_eq!(base, model("out/merges/first/model"));
    assert_eq!(with_adapter, model("out/merges/first/model+lora"));
    let tokenizer = last.tokenizer.unwrap().source;
    assert_eq!(tokenizer, TokenizerSource::Model(base));
    for (text, error) in [
        (
            format!("{one}---\n{two}"),
            "line 1: a second recipe follows, and this recipe has no name",
        ),
        (format!("name: ../x\n{one}---\n{two}"), "line 1: `../x` is no name for a merge"),
        (
            format!("name: x\n{one}---\nname: x\n{one}---\n{two}"),
            "line 5: two recipes have the name `x`",
        ),
        (format!("name: x\n{one}---\n{two}lamda: 1\n"), "line 11: `lamda` is not known here"),
        (
            format!(
                "name: x\n{}---\nname: late\n{one}---\n{two}",
                one.replace("model: a", "model: late")
            ),
            "line 1: the recipe reads the merge `late`, which is not made before it",
        ),
        (
            format!("name: x\n{one}---\nmerge_method: ram\n"),
            "line 5: the method `ram` does not exist",
        ),
    ] {
        let found = all(&text).unwrap_err();
        assert!(found.contains(error), "{text}: {found}");
    }
    // A file may end with a separator.
    assert_eq!(all(&format!("{one}---\n")).unwrap().len(), 1);
}

fn any_model() -> impl Strategy<Value = ModelSpec> {
    let part = || "[^\u{0}]{1,6}";
    let adapter = prop::option::of((part(), prop::option::of(part())));
    (part(), prop::option::of(part()), adapter).prop_map(|(model, revision, adapter)| ModelSpec {
        model,
        revision,
        adapter,
    })
}

fn any_setting() -> impl Strategy<Value = Setting> {
    let points = prop::collection::vec(-1e30..1e30f64, 1..4);
    let filter = prop::option::of(any::<String>());
    let case = (filter, points).prop_map(|(filter, points)| Case {
        // `*` is the same as no filter.
        filter: filter.filter(|filter| filter != "*"),
        points,
    });
    prop::collection::vec(case, 1..4).prop_map(|cases| Setting { cases })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_written_recipe_is_read_as_the_same(
        models in prop::collection::btree_set(any_model(), 1..4),
        setting in any_setting(),
        token in any::<String>(),
        row in any_model(),
        template in "[^\u{0}]{1,40}",
    ) {
        let mut parameters = Parameters::default();
        parameters.set(Parameter::Weight, Placed { place: Place::Flags, value: setting });
        let inputs = models.into_iter().map(|model| {
            Placed { place: Place::Flags, value: ModelInput { model, parameters: parameters.clone() } }
        });
        let token = (token, TokenRecipe { source: Some(TokenRow::Model(row)), force: true });
        let recipe = Recipe {
            name: None,
            merge_method: method("linear").name.into(),
            base_model: None,
            inputs: MergeInputs::Models(inputs.collect()),
            module_parameters: parameters.clone(),
            parameters: Parameters::default(),
            dtype: Some(StoredDtype::F16),
            out_dtype: None,
            tokenizer: Some(TokenizerRecipe { tokens: InOrder(vec![token]), ..TokenizerRecipe::of(TokenizerSource::Base) }),
            chat_template: Some(template),
            ignored: Vec::new(),
        };
        let written = recipe.to_yaml(str::to_string);
        prop_assert_eq!(read(&written), Ok(recipe), "{}", written);
    }
}
