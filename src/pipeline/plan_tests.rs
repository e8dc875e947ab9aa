//! Plans of real models on machines people have, pinned: placement, settings, peaks.

use crate::bytes::ByteSize;
use crate::linalg::gram::GramMatrix;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype};
use crate::model::on_device::DeviceGrams;
use crate::model::shapes::shape;
use crate::model::{Dtypes, ModelConfig, WeightForms};
use crate::pipeline::{Flow, Propagation, RunShape, TaskShape};
use crate::placement::device_map::Prefixes;
use crate::placement::planner::least_that_works;
use crate::placement::{
    Budget, DeviceMap, ExecutionOption, Inventory, PlanFailure, Policy, Processors, Workload, plan,
};
use crate::pruning::Technique;
use crate::run::memory_settings::{GramsHeld, MemorySettings, StatisticsHeld, WeightsHeld};
use crate::run::plan::PartKind;
use crate::run::{HiddenStatesStorage, Phase, Plan};
use crate::runtime::Side;
use serde_json::json;

const GIB: u64 = 1 << 30;

/// The default run: Wanda with 128 samples, the windows of WikiText-2's test text, f16 or bf16 weights, the model saved.
fn planned(name: &str, machine: serde_json::Value, policy: &Policy) -> Result<Plan, PlanFailure> {
    let shape = shape(name).unwrap();
    let config = shape.config().unwrap();
    planned_for(&config, shape.dtype, machine, policy)
}

fn planned_for(
    config: &ModelConfig,
    dtype: StoredDtype,
    machine: serde_json::Value,
    policy: &Policy,
) -> Result<Plan, PlanFailure> {
    let machine: Inventory = serde_json::from_value(machine).unwrap();
    plan(&run(config, dtype, machine.cpu.threads), &machine, policy)
}

/// Matrices as stored.
static DENSE: WeightForms = WeightForms::dense();

fn run(config: &ModelConfig, dtype: StoredDtype, threads: usize) -> RunShape<'_> {
    RunShape {
        config,
        dtypes: Dtypes::all(dtype),
        forms: &DENSE,
        gpu_dtype: dtype,
        seqlen: 2048,
        samples: 128,
        windows: if config.vocab_size > 64_000 { 141 } else { 166 },
        sides: &[Side::Pruned],
        tasks: TaskShape::default(),
        against: None,
        flow: crate::pipeline::Flow::default(),
        technique: crate::pruning::method("wanda").map(crate::pruning::Technique::of),
        of_all_ranks: None,
        shared_with: Vec::new(),
        observes: None,
        trains: None,
        saves: true,
        threads,
        products: Products::F32,
        tokenizing: ByteSize(300 << 20),
        retained: ByteSize::ZERO,
        settings: None,
    }
}

#[test]
fn a_run_fits_exactly_the_memory_of_its_smallest_combination_of_settings() {
    for (name, products) in
        [("llama-2-7b", Products::F32), ("llama-3.2-1b", Products::Bf16(Kernel::Avx512))]
    {
        let shape = shape(name).unwrap();
        let config = shape.config().unwrap();
        let run = RunShape {
            products,
            tokenizing: ByteSize::ZERO,
            retained: ByteSize::ZERO,
            ..run(&config, shape.dtype, 4)
        };
        let machine = json!({"cpu": {"memory": "64GiB", "threads": 4}});
        let machine: Inventory = serde_json::from_value(machine).unwrap();
        // Every combination is looked at, whatever phase its settings belong to.
        let least = least_that_works(&run).cpu;
        let with = |bytes| Policy { budget: Budget::of_cpu(bytes), ..Policy::default() };
        assert_eq!(peak(&plan(&run, &machine, &with(least)).unwrap(), "cpu"), least);
        assert!(plan(&run, &machine, &with(ByteSize(least.0 - 1))).is_err());
    }
}

fn policy(text: &str) -> Policy {
    Policy { budget: text.parse().unwrap(), ..Policy::default() }
}

fn devices(plan: &Plan) -> Vec<(usize, usize, String)> {
    plan.layers.iter().map(|run| (run.first, run.last, run.devices.join("+"))).collect()
}

fn peak(plan: &Plan, device: &str) -> ByteSize {
    plan.devices.iter().find(|plan| plan.device == device).unwrap().peak
}

#[test]
fn runs_that_share_statistics_need_a_copy_of_a_layer_and_windows_of_their_own() {
    let config = shape("llama-2-7b").unwrap().config().unwrap();
    let technique = |name: &str| Technique::of(crate::pruning::method(name).unwrap());
    let option = ExecutionOption {
        settings: MemorySettings::default(),
        storage: HiddenStatesStorage::Ram,
        processors: Processors::Cpu,
    };
    let flow = Flow { propagation: Propagation::Dense, ..Flow::default() };
    let memory = |technique: Technique, shared_with: Vec<Technique>, phase, kind| {
        let run = RunShape {
            technique: Some(technique),
            shared_with,
            flow,
            ..run(&config, StoredDtype::F16, 8)
        };
        let phases = run.layers(&option).host;
        let phase = phases.iter().find(|memory| memory.phase == phase).unwrap();
        phase.of(kind)
    };
    let alone = |name, phase, kind| memory(technique(name), Vec::new(), phase, kind);
    let three = |phase, kind| {
        let others = vec![technique("sparsegpt"), technique("wanda")];
        memory(technique("wanda"), others, phase, kind)
    };
    let state = 2048 * 4096 * 4;
    for phase in [Phase::Calibrate, Phase::Score, Phase::EvaluatePruned] {
        assert_eq!(alone("wanda", phase, PartKind::LayerCopy), ByteSize::ZERO);
        let layer = alone("wanda", phase, PartKind::Layer);
        assert!(layer.0 >= 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008));
        assert_eq!(three(phase, PartKind::LayerCopy), layer);
        assert_eq!(three(phase, PartKind::Layer), layer);
        let states = three(phase, PartKind::HiddenStates);
        assert_eq!(states, ByteSize((128 + 3 * 166) * state));
    }
    assert_eq!(
        three(Phase::Calibrate, PartKind::Statistics),
        alone("sparsegpt", Phase::Calibrate, PartKind::Statistics),
        "Gram matrices contain the column squares"
    );
    // A run by itself frees the statistics of an input when its matrices are done. Runs that share statistics keep them.
    let gram = GramMatrix::bytes(4096).0;
    let apart = alone("sparsegpt", Phase::Score, PartKind::Scores);
    let together = three(Phase::Score, PartKind::Scores);
    assert!(together.0 > apart.0 && together.0 >= 3 * gram, "{together} {apart}");
}

#[test]
fn gram_matrices_are_on_a_card_that_has_room_for_them() {
    let config = shape("llama-2-7b").unwrap().config().unwrap();
    let sparsegpt = crate::pruning::method("sparsegpt").map(Technique::of);
    let run = RunShape { technique: sparsegpt, ..run(&config, StoredDtype::F16, 8) };
    let planned = |card: &str| {
        let machine = json!({"cpu": {"memory": "32GiB", "threads": 8}, "gpus": [{"memory": card}]});
        let machine: Inventory = serde_json::from_value(machine).unwrap();
        let plan = plan(&run, &machine, &Policy::default()).unwrap();
        assert_eq!(devices(&plan), [(0, 31, "cuda:0".to_string())]);
        let on_card = |phase| {
            let mut phases = plan.phases.iter();
            let phase = phases.find(|one| one.phase == phase && one.device == "cuda");
            let mut parts = phase.unwrap().parts.iter();
            let part = parts.find(|part| part.kind == PartKind::Statistics);
            part.map_or(ByteSize::ZERO, |part| part.bytes)
        };
        assert_eq!(on_card(Phase::Propagate), ByteSize::ZERO);
        let settings = plan.memory_settings.clone();
        (settings, on_card(Phase::Calibrate), plan.time.seconds)
    };
    let (large, sums, fast) = planned("24GiB");
    let held = (large.grams, large.statistics);
    assert_eq!(held, (GramsHeld::Device, StatisticsHeld::Layer));
    assert_eq!(sums, DeviceGrams::bytes(&[4096, 4096, 4096, 11008]));
    let (small, sums, slow) = planned("1400MiB");
    assert_eq!((small.grams, sums), (GramsHeld::Host, ByteSize::ZERO));
    assert!(fast < 0.8 * slow, "{fast} {slow}");
    // Where the inputs are observed in turn, there is room for the largest Gram matrix only.
    let apart = MemorySettings { statistics: StatisticsHeld::Input, ..large };
    assert_eq!(run.grams_on_gpu(&apart), [11008]);
}

#[test]
fn one_12_gb_card_computes_all_of_a_7b() {
    let plan = planned(
        "llama-2-7b",
        json!({"cpu": {"memory": "32GiB", "threads": 8}, "gpus": [{"memory": "12GB"}]}),
        &Policy::default(),
    )
    .unwrap();
    assert_eq!(devices(&plan), [(0, 31, "cuda:0".to_string())]);
    assert_eq!(plan.hidden_states.storage, HiddenStatesStorage::Device);
    // (128 + 166) samples of 2048 · 4096 in f16.
    assert_eq!(plan.hidden_states.bytes, ByteSize(294 * 2048 * 4096 * 2));
    assert!(
        plan.memory_settings.prefetch && plan.memory_settings.attention_heads.is_none(),
        "nothing is short: {plan:?}"
    );
    let gpu = ByteSize(peak(&plan, "cuda:0").0 - plan.hidden_states.bytes.0);
    assert!(ByteSize(GIB) < gpu && gpu < ByteSize(3 * GIB), "context, a layer, one sample: {gpu}");
    // A card without room for the hidden states computes, too, and they travel.
    let small = json!({"cpu": {"memory": "32GiB", "threads": 8}, "gpus": [{"memory": "4GB"}]});
    let small = planned("llama-2-7b", small, &Policy::default()).unwrap();
    assert_eq!(devices(&small), [(0, 31, "cuda:0".to_string())]);
    assert_eq!(small.hidden_states.storage, HiddenStatesStorage::Ram);
    assert!(peak(&small, "cuda:0") < ByteSize(3 * GIB));
    assert!(small.time.seconds > plan.time.seconds);
}

#[test]
fn two_24_gb_cards_share_the_samples_of_a_70b() {
    let machine = json!({"cpu": {"memory": "64GiB", "threads": 16}, "gpus": [{"memory": "24GiB"}, {"memory": "24GiB"}]});
    let plan = planned("llama-2-70b", machine.clone(), &Policy::default()).unwrap();
    assert_eq!(devices(&plan), [(0, 79, "cuda:0+cuda:1".to_string())]);
    assert_eq!(plan.hidden_states.storage, HiddenStatesStorage::Device);
    let half = ByteSize(plan.hidden_states.bytes.0 / 2);
    assert!(peak(&plan, "cuda:1") < half + ByteSize(8 * GIB));
    assert!(peak(&plan, "cpu") < ByteSize(51 * GIB));
    let balanced = Policy { map: DeviceMap::Balanced, ..Policy::default() };
    let balanced = planned("llama-2-70b", machine, &balanced).unwrap();
    assert_eq!(devices(&balanced), [(0, 39, "cuda:0".to_string()), (40, 79, "cuda:1".to_string())]);
    assert!(balanced.time.seconds > plan.time.seconds, "one card at a time works half as fast");
    assert_eq!(balanced.hidden_states.storage, HiddenStatesStorage::Ram, "they change cards");
}

#[test]
fn a_7b_on_a_laptop_of_8_gb_spills_its_hidden_states_and_keeps_its_speed() {
    let plan =
        planned("llama-2-7b", json!({"cpu": {"memory": "8GiB", "threads": 4}}), &Policy::default())
            .unwrap();
    assert_eq!(devices(&plan), [(0, 31, "cpu".to_string())]);
    // 294 samples of 32 MiB do not fit.
    assert_eq!(
        (plan.hidden_states.storage, plan.hidden_states.bytes),
        (HiddenStatesStorage::Disk, ByteSize(294 << 25))
    );
    assert!(plan.memory_settings.prefetch && plan.memory_settings.weights == WeightsHeld::Layer);
    assert!(peak(&plan, "cpu") < ByteSize(3 * GIB / 2), "{}", peak(&plan, "cpu"));
}

#[test]
fn a_405b_fits_an_80_gb_card_and_128_gb_of_memory() {
    let plan = planned(
        "llama-3.1-405b",
        json!({"cpu": {"memory": "128GiB", "threads": 32}, "gpus": [{"memory": "80GiB"}]}),
        &Policy::default(),
    )
    .unwrap();
    assert_eq!(devices(&plan), [(0, 125, "cuda:0".to_string())]);
    assert!(plan.memory_settings.prefetch, "two layers are 12 GiB");
    assert!(peak(&plan, "cuda:0") < plan.hidden_states.bytes + ByteSize(16 * GIB));
    assert!(peak(&plan, "cpu") < ByteSize(40 * GIB));
}

#[test]
fn a_tied_embedding_is_read_for_the_head_and_counted_once() {
    let plan = planned(
        "llama-3.2-1b",
        json!({"cpu": {"memory": "16GiB", "threads": 4}}),
        &Policy::default(),
    )
    .unwrap();
    let head = plan.phases.iter().find(|phase| phase.phase == Phase::Head).unwrap();
    let weight = ByteSize(128_256 * 2048 * 2);
    // Calibration samples have gone by then.
    let windows = ByteSize(141 * 2048 * 2048 * 4);
    assert!(head.bytes > weight + windows);
    assert!(head.bytes < weight + weight + windows);
}

#[test]
fn a_manual_map_is_kept_also_where_it_mixes_devices() {
    let machine = json!({"cpu": {"memory": "64GiB", "threads": 8}, "gpus": [{"memory": "24GiB"}, {"memory": "24GiB"}]});
    let map = Prefixes::from_json(
        &json!({"": "cpu", "model.layers.0": 1, "model.layers.1": 1, "model.layers.31": "cuda:0"}),
    )
    .unwrap();
    let policy = Policy { map: DeviceMap::Manual(map), ..Policy::default() };
    let plan = planned("llama-2-7b", machine, &policy).unwrap();
    assert_eq!(
        devices(&plan),
        [(0, 1, "cuda:1".to_string()), (2, 30, "cpu".to_string()), (31, 31, "cuda:0".to_string())]
    );
    let workspace = |plan: &Plan| {
        plan.phases.iter().any(|phase| {
            phase.device == "cpu" && phase.parts.iter().any(|part| part.kind == PartKind::Workspace)
        })
    };
    assert!(workspace(&plan), "the layers on the CPU need its workspace");
    // A map that names a card too small for a layer is an error; the planner does not change the map.
    let small = json!({"cpu": {"memory": "64GiB", "threads": 8}, "gpus": [{"memory": "24GiB"}, {"memory": "700MiB"}]});
    let Err(PlanFailure::DoesNotFit(shortages)) = planned("llama-2-7b", small, &policy) else {
        panic!("a layer does not fit")
    };
    assert_eq!(shortages[0].device, "cuda:1");
}

#[test]
fn a_device_with_nothing_is_not_used() {
    let machine = json!({"cpu": {"memory": "64GiB", "threads": 8}, "gpus": [{"memory": "24GiB"}, {"memory": "24GiB"}]});
    let plan = planned("llama-2-7b", machine, &policy("cuda:1=20GiB")).unwrap();
    assert_eq!(devices(&plan), [(0, 31, "cuda:1".to_string())]);
    assert!(plan.devices.iter().all(|device| device.device != "cuda:0"));
}

#[test]
fn a_layer_bigger_than_the_card_is_computed_on_the_cpu_and_said() {
    // A layer of the 405B weighs 6 GiB.
    let machine = json!({"cpu": {"memory": "128GiB", "threads": 32}, "gpus": [{"memory": "6GiB"}]});
    let plan = planned("llama-3.1-405b", machine, &Policy::default()).unwrap();
    assert_eq!(devices(&plan), [(0, 125, "cpu".to_string())]);
    assert!(plan.notes.iter().any(|note| note.contains("cuda:0 is not used")), "{:?}", plan.notes);
}

#[test]
fn less_memory_takes_smaller_settings_and_more_time() {
    let machine = json!({"cpu": {"memory": "64GiB", "threads": 4}});
    let at = |limit: u64| {
        let policy = Policy { budget: Budget::of_cpu(ByteSize(limit << 20)), ..Policy::default() };
        planned("llama-2-7b", machine.clone(), &policy)
    };
    let mut before: Option<Plan> = None;
    for limit in [16_000, 4000, 1300, 1000, 800, 600] {
        let plan = at(limit).unwrap_or_else(|error| panic!("{limit} MiB: {error:?}"));
        assert!(peak(&plan, "cpu") <= ByteSize(limit << 20));
        if let Some(before) = &before {
            assert!(plan.time.seconds >= before.time.seconds);
        }
        before = Some(plan);
    }
    let tight = before.unwrap();
    assert!(!tight.memory_settings.prefetch, "{:?}", tight.memory_settings);
    assert!(at(64).is_err());
}
