//! Text models inside models of several media: every command works on the text model and keeps all else.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::checkpoint::encode_header;
use prune::synthetic::RandomCheckpoint;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};

use crate::support::Place;

const RUN: &str = "--dataset train.txt --eval-dataset test.txt --seqlen 64 --nsamples 4 --eval-windows 2 --use-cpu --threads 2";

/// A tensor of the part that sees pictures.
const VISUAL: &str = "vision_tower.layers.0.weight";

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(place: &Place, folder: &str) -> Tensors {
    let bytes = fs::read(place.path(&format!("{folder}/model.safetensors")))
        .expect("a checkpoint of this test");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint of this test");
    let all = file.tensors().into_iter();
    all.map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

fn json_of(place: &Place, file: &str) -> Value {
    serde_json::from_slice(&fs::read(place.path(file)).expect("a checkpoint of this test"))
        .expect("a checkpoint of this test")
}

/// Puts the model `m` inside a model of several media, `wrapped`.
fn wrap(place: &Place, stored: &dyn Fn(&str) -> String) {
    fs::create_dir(place.path("wrapped")).expect("a checkpoint of this test");
    fs::copy(place.path("m/tokenizer.json"), place.path("wrapped/tokenizer.json"))
        .expect("a checkpoint of this test");
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    let mut all = tensors(place, "m");
    all.insert(
        VISUAL.to_owned(),
        (Dtype::F32, vec![3], [1.5f32, -2.0, 0.0].map(f32::to_le_bytes).concat()),
    );
    for (name, (dtype, shape, bytes)) in all {
        let name = if name == VISUAL { name } else { stored(&name) };
        let data_offsets = (data.len(), data.len() + bytes.len());
        infos.push((name, TensorInfo { dtype, shape, data_offsets }));
        data.extend(bytes);
    }
    let mut file = encode_header(&Default::default(), &infos);
    file.extend(data);
    fs::write(place.path("wrapped/model.safetensors"), file).expect("a checkpoint of this test");
    let mut text = json_of(place, "m/config.json");
    text.as_object_mut().expect("a checkpoint of this test").remove("architectures");
    let is_tied = text["tie_word_embeddings"].clone();
    let config = json!({
        "architectures": ["AnyForConditionalGeneration"], "model_type": "any", "text_config": text,
        "vision_config": {"hidden_size": 3}, "tie_word_embeddings": is_tied,
    });
    fs::write(place.path("wrapped/config.json"), config.to_string())
        .expect("a checkpoint of this test");
}

/// The result of a command on the wrapped model has the bits of the result on the model by itself.
fn assert_same(place: &Place, stored: &dyn Fn(&str) -> String, ours: &str, inside: &str) {
    let mut wrapped = tensors(place, inside);
    assert_eq!(wrapped.remove(VISUAL), tensors(place, "wrapped").remove(VISUAL));
    let plain = tensors(place, ours).into_iter().map(|(name, of)| (stored(&name), of));
    assert!(plain.collect::<Tensors>() == wrapped, "{inside}");
}

#[test]
fn a_text_model_inside_another_has_the_bits_of_the_model_by_itself() {
    let gemma = json!({"query_pre_attn_scalar": 16, "sliding_window": 24, "head_dim": 16});
    for (model_type, settings, prefix, head) in [
        ("qwen3", json!({}), "model.language_model.", "lm_head.weight"),
        ("gemma3_text", gemma, "language_model.model.", "language_model.lm_head.weight"),
    ] {
        let checkpoint = RandomCheckpoint {
            settings: settings.as_object().unwrap().clone(),
            num_hidden_layers: 3,
            ..RandomCheckpoint::of_family(model_type).unwrap()
        };
        let place = Place::with(&checkpoint);
        let stored = |name: &str| match name {
            "lm_head.weight" => head.to_owned(),
            name => name.replacen("model.", prefix, 1),
        };
        wrap(&place, &stored);
        for (name, flags) in
            [("wanda", "--sparsity-ratio 0.5"), ("dropped", "--drop-layers 1 --sparsity-ratio 0.5")]
        {
            for model in ["m", "wrapped"] {
                let ran =
                    place.run(&format!("--model {model} {flags} {RUN} --save {name}-{model}"));
                assert_eq!(ran.code, 0, "{}", ran.stderr);
            }
            let [ours, inside] =
                ["m", "wrapped"].map(|model| json_of(&place, &format!("{name}-{model}/run.json")));
            assert_eq!(ours["perplexity"], inside["perplexity"], "{model_type}");
            let [ours, inside] = ["m", "wrapped"].map(|model| format!("{name}-{model}/model"));
            assert_same(&place, &stored, &ours, &inside);
            let config = json_of(&place, &format!("{inside}/config.json"));
            let text = &config["text_config"];
            let plain = json_of(&place, &format!("{ours}/config.json"));
            assert_eq!(text["num_hidden_layers"], plain["num_hidden_layers"]);
            assert_eq!(text["layer_types"], plain["layer_types"]);
            assert_eq!(config["vision_config"], json!({"hidden_size": 3}));
        }
        compare_changed_weights(&place, &stored);
    }
}

/// Merges, trains and quantises the pruned models of both kinds.
fn compare_changed_weights(place: &Place, stored: &dyn Fn(&str) -> String) {
    let [m, wrapped] = ["m", "wrapped"];
    for model in [m, wrapped] {
        for command in [
            format!(
                "merge --method linear --model {model} --model wanda-{model}/model --weight 0.25,0.75 --save merged-{model}"
            ),
            format!(
                "recover --model wanda-{model}/model --how lora --rank 4 --steps 2 --dataset train.txt --seqlen 32 --eval none \
                 --save-adapter --use-cpu --save recovered-{model}"
            ),
            format!(
                "merge --method linear --model wanda-{model}/model+recovered-{model}/adapter --save adapted-{model}"
            ),
            format!(
                "merge --base wanda-{model}/model --model wanda-{model}/model+recovered-{model}/adapter --method linear \
                 --semantics peft --save combined-{model}"
            ),
            format!(
                "merge --method linear --model wanda-{model}/model+combined-{model}/adapter --save folded-{model}"
            ),
            format!("quantize {model} --to nf4 --save quantised-{model}"),
        ] {
            let ran = place.run(&command);
            assert_eq!(ran.code, 0, "{command}: {}", ran.stderr);
        }
    }
    for name in ["merged", "recovered", "adapted", "combined", "folded"] {
        let [ours, inside] = [m, wrapped].map(|model| format!("{name}-{model}/model"));
        assert_same(place, stored, &ours, &inside);
        let config = json_of(place, &format!("{inside}/config.json"));
        assert_eq!(config["vision_config"], json!({"hidden_size": 3}));
        let card = fs::read_to_string(place.path(&format!("{inside}/README.md")))
            .expect("an output of this test");
        assert!(card.contains("AnyForConditionalGeneration.from_pretrained"), "{card}");
    }
    assert_same(place, stored, "quantised-m", "quantised-wrapped");
    let config = json_of(place, "quantised-wrapped/config.json");
    let skipped = &config["quantization_config"]["llm_int8_skip_modules"];
    assert_eq!(*skipped, json!(["lm_head", "model.vision_tower", "vision_tower"]));
    for folder in ["recovered-wrapped", "combined-wrapped"] {
        assert_inside(&place.path(&format!("{folder}/adapter/adapter_model.safetensors")));
    }
}

/// The names of an adapter are of the text model inside another model.
fn assert_inside(adapter: &Path) {
    let adapter = fs::read(adapter).expect("an output of this test");
    let adapter = safetensors::SafeTensors::deserialize(&adapter).expect("an output of this test");
    let beginning = "base_model.model.model.language_model.layers.";
    assert!(adapter.names().iter().all(|name| name.starts_with(beginning)));
}
