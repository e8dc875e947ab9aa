//! Memory of a layer's backward pass on a device, and of Gram matrices there: candle's operators on the CPU allocate no
//! more than the plan of a GPU says.

use super::*;
use candle_core::{DType, Device, Tensor};
use prune::checkpoint::Checkpoint;
use prune::linalg::MaskedLowRank;
use prune::model::observe::FromDevice;
use prune::model::on_device::{DeviceGrams, Tiling};
use prune::model::{DecoderLayer, InputId, LayerContext, LayerGradients, Observer};
use prune::runtime::engine::{Engine, OnCandle};

/// Tokens of a sample: enough that tensors outweigh the scratch memory of candle's products on the CPU.
const LONG: usize = 1024;

/// Lets a device sum up Gram matrices.
struct SumsOfGrams(bool);

impl Observer for SumsOfGrams {
    fn observe(&mut self, _point: InputId, _rows: &[f32]) {}

    fn wants(&mut self, _point: InputId) -> FromDevice<'_> {
        FromDevice::Gram(&[])
    }
}

/// Two samples of a backward pass, or of a pass with Gram matrices. Leaves the counted bytes and the planned ones.
#[test]
#[ignore = "started by the other test of this module, in a process of its own"]
fn child() -> anyhow::Result<()> {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return Ok(());
    };
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global()?;
    let config = ModelConfig::load("m".as_ref())?;
    let checkpoint = Checkpoint::open("m".as_ref())?;
    let context = LayerContext::new(&config, LONG);
    let layer = DecoderLayer::load(&checkpoint, &config, 0)?;
    let mut engine = OnCandle::new(Device::Cpu, DType::F32, String::new(), &context)?;
    engine.begin(&layer)?;
    for id in layer.linear_ids() {
        engine.take_up(&layer, id)?;
    }
    let mut grams = SumsOfGrams(arguments.starts_with("grams"));
    let mut gradients = match arguments.split_once(' ').expect("two words").0 {
        "weights" => LayerGradients::new(&layer, layer.linear_ids()).with_norms(&layer),
        _ => {
            let changes = layer.linear_ids().map(|id| {
                let weight = layer.linear(id).weight();
                let weight = weight.held().expect("a layer in memory");
                let (out, inner) = (weight.rows(), weight.columns());
                let [a, b] = [vec![0.1; 16 * inner], vec![0.1; out * 16]];
                (id, MaskedLowRank::new(weight, a, b, 1.0))
            });
            LayerGradients::of_factors(changes.collect())
        }
    };
    let mut cut = Tiling::of(&MemorySettings::default(), &config);
    if arguments.ends_with("small") {
        cut = cut.smaller().and_then(|cut| cut.smaller()).expect("smaller");
    }
    let widths = config.input_widths().values().copied().collect::<Vec<_>>();
    let planned = match grams.0 {
        true => cut.capture_bytes(&config, LONG, 4, &widths) + DeviceGrams::bytes(&widths),
        false => cut.backward_bytes(&config, LONG, 4, gradients.sizes()),
    };
    let state = Tensor::ones((LONG, config.hidden_size), DType::F32, &Device::Cpu)?;
    let counted = |work: &mut dyn FnMut() -> anyhow::Result<()>| {
        let before = ALIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        work()?;
        anyhow::Ok(PEAK.load(Ordering::Relaxed) - before)
    };
    // Products of candle on the CPU have scratch memory, that of a GPU is part of its context.
    let wide = Tensor::ones((config.hidden_size, LONG), DType::F32, &Device::Cpu)?;
    let scratch = counted(&mut || {
        state.matmul(&wide)?;
        Ok(())
    })?;
    let scratch = scratch - 4 * LONG * LONG;
    let all = counted(&mut || {
        for _ in 0..2 {
            match grams.0 {
                true => {
                    engine.begin_block();
                    engine.capture(&layer, &state, &cut, &mut grams)?.show(&mut grams)?;
                    engine.keep_block()?;
                }
                false => {
                    engine.backward(&layer, [&state, &state], &mut gradients, &cut)?;
                }
            }
        }
        Ok(())
    })?;
    eprintln!("{arguments}: scratch {scratch}, all {all}");
    fs::write(TAKEN, format!("{} {}", all - scratch, planned.0))?;
    Ok(())
}

#[test]
fn backward_passes_and_gram_matrices_of_a_device_take_what_is_planned() {
    let of_family = |model_type: &str, settings: Value| {
        let settings = settings.as_object().expect("keys").clone();
        RandomCheckpoint {
            hidden_size: 512,
            intermediate_size: 1376,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            num_hidden_layers: 1,
            max_position_embeddings: LONG,
            settings,
            ..RandomCheckpoint::of_family(model_type).expect("a family")
        }
    };
    let cases = ["weights", "factors", "grams"];
    let cases =
        cases.into_iter().flat_map(|case| [format!("{case} whole"), format!("{case} small")]);
    let cases: Vec<String> = cases.collect();
    let mut wrong = Vec::new();
    for (shape, cases) in [
        (of_family("llama", json!({})), &cases[..]),
        // Bounded scores, and all norms.
        (of_family("gemma3_text", json!({"attn_logit_softcapping": 50.0})), &cases[..2]),
        // A window that is much shorter than a sample.
        (of_family("mistral", json!({"sliding_window": 100})), &cases[..2]),
        // Fused matrices.
        (of_family("phi3", json!({"partial_rotary_factor": 0.5})), &cases[..2]),
        // Norms over all heads, and none before the blocks.
        (of_family("olmo2", json!({})), &cases[..2]),
    ] {
        let (place, family) = (Place::with(&shape), shape.family.model_type);
        for case in cases {
            let (counted, planned) = measured(&place, "backward::child", case);
            eprintln!("{family} {case}: planned {planned}, counted {counted}");
            // On an Intel Xeon with AMX, `grams whole` counted 31.9 MB of 65.9 MB planned; the cause is not known.
            if counted > planned || 2 * planned > 5 * counted {
                wrong.push(format!("{family} {case}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
