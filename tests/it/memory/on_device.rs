//! Memory of a layer and of the head on a device, forwards, backwards and with Gram matrices: candle's operators on the CPU allocate
//! what the plan of a GPU says, within a tenth.

use super::*;
use candle_core::{DType, Device, Tensor};
use prune::checkpoint::Checkpoint;
use prune::linalg::MaskedLowRank;
use prune::model::observe::FromDevice;
use prune::model::on_device::{DeviceGrams, Tiling};
use prune::model::{DecoderLayer, Head, InputId, LayerContext, LayerGradients, Observer};
use prune::runtime::engine::{Engine, OnCandle};

/// Tokens of a sample: enough that tensors outweigh the scratch memory of candle's products on the CPU.
const LONG: usize = 1024;

/// Lets a device sum up Gram matrices.
struct SumsOfGrams(bool);

impl Observer for SumsOfGrams {
    fn observe(&mut self, _point: InputId, _rows: &[f32]) {}

    fn wants(&mut self, _point: InputId) -> FromDevice<'_> {
        if self.0 { FromDevice::Gram(&[]) } else { FromDevice::Sums(&[]) }
    }
}

/// Two samples of a pass, or two blocks of two. Leaves the counted bytes and the planned bytes.
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
    let work = arguments.split_once(' ').expect("two words").0;
    let (planned, inputs) = match work {
        "forward" => (cut.pass_bytes(&config, LONG, 4), 1),
        "capture" => (cut.capture_bytes(&config, LONG, 4, &[]), 1),
        "grams" => (cut.capture_bytes(&config, LONG, 4, &widths) + DeviceGrams::bytes(&widths), 1),
        "head" => (cut.head_bytes(&config, LONG, config.vocab_size, 4), 1),
        _ => (cut.backward_bytes(&config, LONG, 4, gradients.sizes()), 2),
    };
    let state = Tensor::ones((LONG, config.hidden_size), DType::F32, &Device::Cpu)?;
    let head = Head::load(&checkpoint, &config)?;
    let chunk = head.chunk(0..config.vocab_size)?;
    if work == "head" {
        engine.begin_head(&chunk)?;
    }
    let tokens: Vec<u32> = (0..LONG).map(|at| (at * at % config.vocab_size) as u32).collect();
    let mut grams = SumsOfGrams(work == "grams");
    SKIPS_SCRATCH.store(true, Ordering::Relaxed);
    let before = ALIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let mut held = None;
    let samples = if work == "grams" { 4 } else { 2 };
    for sample in 0..samples {
        if sample % 2 == 0 {
            engine.keep_block()?;
            engine.begin_block();
        }
        match work {
            // The host takes an output while the next sample passes.
            "forward" => drop(held.replace(engine.forward(&layer, &state, &cut)?)),
            "head" => drop(engine.head_window(&chunk, &state, &tokens, &cut)?),
            "capture" | "grams" => {
                engine.capture(&layer, &state, &cut, &mut grams)?.show(&mut grams)?;
            }
            _ => drop(engine.backward(&layer, [&state, &state], &mut gradients, &cut)?),
        }
    }
    drop(held);
    let all = PEAK.load(Ordering::Relaxed) - before;
    // The plan has the tensors that the work begins with, too.
    let inputs = inputs * 4 * state.elem_count();
    fs::write(TAKEN, format!("{} {}", all + inputs, planned.0))?;
    Ok(())
}

#[test]
fn passes_of_a_device_take_what_is_planned() {
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
    let cases = ["weights", "factors", "forward", "capture", "grams", "head"];
    let cases =
        cases.into_iter().flat_map(|case| [format!("{case} whole"), format!("{case} small")]);
    let cases: Vec<String> = cases.collect();
    let mut wrong = Vec::new();
    for (shape, cases) in [
        (of_family("llama", json!({})), &cases[..]),
        // Bounded scores, and all norms.
        (of_family("gemma3_text", json!({"attn_logit_softcapping": 50.0})), &cases[..2]),
        // Attention needs more than the MLP.
        (RandomCheckpoint { intermediate_size: 128, ..of_family("llama", json!({})) }, &cases[..2]),
        // A window that is much shorter than a sample.
        (of_family("mistral", json!({"sliding_window": 100})), &cases[1..2]),
        // Fused matrices.
        (of_family("phi3", json!({"partial_rotary_factor": 0.5})), &cases[1..2]),
        // Norms over all heads, and none before the blocks.
        (of_family("olmo2", json!({})), &cases[..2]),
    ] {
        let (place, family) = (Place::with(&shape), shape.family.model_type);
        for case in cases {
            let (counted, planned) = measured(&place, "on_device::child", case);
            eprintln!("{family} {case}: planned {planned}, counted {counted}");
            // The host holds numbers of every token, too.
            if counted > planned + 64 * LONG as u64 || 10 * planned > 11 * counted {
                wrong.push(format!("{family} {case}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
