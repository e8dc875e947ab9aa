//! Properties of every plan, on random numbers. Plans of real models are pinned in `pipeline/plan_tests.rs`.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::placement::inventory::{Cpu, Gpu};
use crate::placement::{Budget, DeviceMap, cpu_budget};
use crate::run::MemorySettings;
use crate::run::plan::PartKind;

/// A workload of given numbers. Settings hold indices: `mlp_tokens` for the layers' demand, `logits_bytes` for the head's demand.
#[derive(Debug, Clone, Default)]
struct Table {
    num_hidden_layers: usize,
    /// By storage and settings.
    on_cpu: [Vec<Row>; 2],
    on_gpu: [Vec<Row>; 2],
}

/// The demand of the layers' phases with a setting, and the demands of the head by its settings.
#[derive(Debug, Clone, Default)]
struct Row {
    prefetch: bool,
    layers: Demand,
    heads: Vec<Demand>,
}

const STORAGES: [HiddenStatesStorage; 2] = [HiddenStatesStorage::Ram, HiddenStatesStorage::Disk];

impl Table {
    fn rows(&self, processors: Processors, storage: HiddenStatesStorage) -> &[Row] {
        let rows = match processors {
            Processors::Cpu => &self.on_cpu,
            Processors::Gpus(_) => &self.on_gpu,
        };
        &rows[usize::from(storage == HiddenStatesStorage::Disk)]
    }

    fn row(&self, option: &ExecutionOption) -> Option<&Row> {
        self.rows(option.processors, option.storage).get(option.settings.mlp_tokens)
    }
}

impl Workload for Table {
    fn num_hidden_layers(&self) -> usize {
        self.num_hidden_layers
    }

    fn layer_weights(&self) -> ByteSize {
        ByteSize(1000)
    }

    fn hidden_states(&self, _: Processors) -> ByteSize {
        ByteSize(1)
    }

    fn storages(&self, _processors: Processors) -> Vec<HiddenStatesStorage> {
        STORAGES.to_vec()
    }

    fn layer_settings(&self, processors: Processors) -> Vec<MemorySettings> {
        let [ram, disk] = STORAGES.map(|storage| self.rows(processors, storage));
        let settings = |(index, row): (usize, &Row)| MemorySettings {
            prefetch: row.prefetch,
            mlp_tokens: index,
            ..MemorySettings::default()
        };
        let longer = if ram.len() < disk.len() { disk } else { ram };
        longer.iter().enumerate().map(settings).collect()
    }

    fn head_settings(&self, settings: &MemorySettings) -> Vec<MemorySettings> {
        let rows = self.on_cpu.iter().chain(&self.on_gpu);
        let heads = rows.flatten().map(|row| row.heads.len()).max();
        let head =
            |index| MemorySettings { logits_bytes: ByteSize(index as u64), ..settings.clone() };
        (0..heads.unwrap_or(0).max(1)).map(head).collect()
    }

    fn layers(&self, option: &ExecutionOption) -> Demand {
        self.row(option).map_or_else(absent, |row| row.layers.clone())
    }

    fn head(&self, option: &ExecutionOption) -> Demand {
        let head = option.settings.logits_bytes.0 as usize;
        let heads = self.row(option).map(|row| row.heads.as_slice());
        match heads {
            Some([]) if head == 0 => Demand::default(),
            heads => heads.and_then(|heads| heads.get(head)).map_or_else(absent, Demand::clone),
        }
    }
}

/// The demand of settings that a row does not have: more than any budget.
fn absent() -> Demand {
    let memory = vec![memory(Phase::Read, vec![u64::MAX, 1])];
    Demand { host: memory.clone(), device: memory, ..Demand::default() }
}

fn memory(phase: Phase, parts: Vec<u64>) -> PhaseMemory {
    let part = |bytes| MemoryPart { kind: PartKind::Workspace, bytes: ByteSize(bytes) };
    PhaseMemory { phase, parts: parts.into_iter().map(part).collect() }
}

/// Bytes from none to more than can be added up.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![0..1000u64, 0..1u64 << 40, Just(u64::MAX), Just(u64::MAX / 2)]
}

fn demand(phase: Phase, on_gpu: bool) -> impl Strategy<Value = Demand> {
    let needs = || vec(vec(bytes(), 0..3), 1..3);
    let amount = || prop_oneof![Just(0.0), 0.0..1e18];
    (needs(), needs(), vec(amount(), 7)).prop_map(move |(host, device, amounts)| Demand {
        host: host.into_iter().map(|parts| memory(phase, parts)).collect(),
        device: match on_gpu {
            true => device.into_iter().map(|parts| memory(phase, parts)).collect(),
            false => Vec::new(),
        },
        work: match phase {
            Phase::Head => {
                Work { once_flop: amounts[0], once_moved: amounts[1], ..Work::default() }
            }
            _ => Work {
                layer_flop: amounts[0],
                layer_beside: amounts[1],
                layer_moved: amounts[2],
                layer_uploaded: amounts[3],
                layer_states: amounts[4],
                once_moved: amounts[5],
                layer_host_flop: amounts[6],
                ..Work::default()
            },
        },
    })
}

fn row(on_gpu: bool) -> impl Strategy<Value = Row> {
    let heads = vec(demand(Phase::Head, on_gpu), 0..4);
    (any::<bool>(), demand(Phase::Read, on_gpu), heads).prop_map(|(prefetch, layers, heads)| Row {
        prefetch,
        layers,
        heads,
    })
}

fn workload() -> impl Strategy<Value = Table> {
    let rows = |on_gpu, least| [vec(row(on_gpu), least..4), vec(row(on_gpu), least..4)];
    (1..200usize, rows(false, 1), rows(true, 0))
        .prop_map(|(num_hidden_layers, on_cpu, on_gpu)| Table { num_hidden_layers, on_cpu, on_gpu })
}

fn machine() -> impl Strategy<Value = Inventory> {
    (bytes(), vec(bytes(), 0..4), 1..64usize).prop_map(|(memory, gpus, threads)| Inventory {
        cpu: Cpu { memory: Some(ByteSize(memory)), threads },
        gpus: gpus
            .into_iter()
            .map(|memory| Gpu { name: String::new(), memory: ByteSize(memory) })
            .collect(),
        rates: Rates::default(),
    })
}

fn map() -> impl Strategy<Value = DeviceMap> {
    prop_oneof![Just(DeviceMap::Auto), Just(DeviceMap::Balanced), Just(DeviceMap::Sequential)]
}

/// The shortages of a workload that does not fit.
fn shortages(failure: PlanFailure) -> Vec<Shortage> {
    match failure {
        PlanFailure::DoesNotFit(shortages) => shortages,
        PlanFailure::Unusable(failure) => panic!("{failure}"),
    }
}

/// The least time of all options that fit the CPU, each looked at: no choice by phase, no early end.
fn least_seconds_on_cpu(workload: &Table, machine: &Inventory) -> Option<f64> {
    let budget = cpu_budget(machine, &Budget::default());
    let rate = machine.rates.cpu_thread_gflops * 1e9 * machine.cpu.threads as f64;
    let disk = machine.rates.disk_gb_s * 1e9;
    let mut seconds: Option<f64> = None;
    for storage in STORAGES {
        for layers in workload.layer_settings(Processors::Cpu) {
            for settings in workload.head_settings(&layers) {
                let option = ExecutionOption { settings, storage, processors: Processors::Cpu };
                let (layers, head) = (workload.layers(&option), workload.head(&option));
                let phases = layers.host.iter().chain(&head.host);
                if phases.map(PhaseMemory::bytes).max() > budget {
                    continue;
                }
                let work = layers.work;
                let flop = work.layer_flop + work.layer_host_flop;
                let (compute, beside) = (flop / rate, work.layer_beside / disk);
                let layer = work.layer_moved / disk
                    + if option.settings.prefetch { compute.max(beside) } else { compute + beside };
                let all = layer * workload.num_hidden_layers as f64
                    + (work.once_moved + head.work.once_moved) / disk
                    + head.work.once_flop / rate;
                seconds = Some(seconds.map_or(all, |least| least.min(all)));
            }
        }
    }
    seconds
}

proptest! {
    #[test]
    fn no_plan_exceeds_a_budget_and_every_layer_has_a_device(workload in workload(), machine in machine(), map in map()) {
        let policy = Policy { map, ..Policy::default() };
        match plan(&workload, &machine, &policy) {
            Ok(plan) => {
                for device in &plan.devices {
                    prop_assert!(device.peak <= device.budget.unwrap(), "{device:?}");
                }
                let mut next = 0;
                for layers in &plan.layers {
                    prop_assert_eq!(layers.first, next);
                    prop_assert!(layers.last >= layers.first && !layers.devices.is_empty());
                    next = layers.last + 1;
                }
                prop_assert_eq!(next, workload.num_hidden_layers);
                prop_assert!(plan.time.seconds.is_finite() && plan.time.seconds >= 0.0);
            }
            Err(failure) => {
                let shortages = shortages(failure);
                for shortage in &shortages {
                    prop_assert!(shortage.needed > shortage.allowed && shortage.short_by() > ByteSize::ZERO);
                }
                prop_assert!(!shortages.is_empty(), "a refusal says what is short");
            }
        }
    }

    #[test]
    fn settings_chosen_by_phase_are_the_fastest_of_all_combinations(workload in workload(), machine in machine()) {
        let policy = Policy { cpu_only: true, ..Policy::default() };
        let planned = plan(&workload, &machine, &policy).ok().map(|plan| plan.time.seconds);
        match (planned, least_seconds_on_cpu(&workload, &machine)) {
            (Some(planned), Some(least)) => prop_assert!((planned - least).abs() <= 1e-9 * least, "{planned} s, {least} s"),
            (planned, least) => prop_assert_eq!(planned, least),
        }
    }

    #[test]
    fn more_memory_never_gives_a_slower_plan(workload in workload(), machine in machine(), more in bytes(), which in 0..4usize) {
        let seconds = |machine: &Inventory| {
            plan(&workload, machine, &Policy::default()).map(|plan| plan.time.seconds)
        };
        let mut larger = machine.clone();
        match larger.gpus.get_mut(which) {
            Some(gpu) => gpu.memory = gpu.memory + ByteSize(more),
            None => larger.cpu.memory = larger.cpu.memory.map(|memory| memory + ByteSize(more)),
        }
        if let Ok(before) = seconds(&machine) {
            let after = seconds(&larger).expect("what fitted still fits");
            prop_assert!(after <= before, "{before} s became {after} s");
        }
    }
}

fn one_row(needs: &[(Phase, u64)], flop: f64) -> Row {
    Row {
        layers: Demand {
            host: needs.iter().map(|(phase, bytes)| memory(*phase, vec![*bytes])).collect(),
            work: Work { layer_flop: flop, ..Work::default() },
            ..Demand::default()
        },
        ..Row::default()
    }
}

fn cpu_only(memory: u64) -> Inventory {
    Inventory {
        cpu: Cpu { memory: Some(ByteSize(memory)), threads: 1 },
        gpus: Vec::new(),
        rates: Rates::default(),
    }
}

#[test]
fn the_fastest_option_that_fits_is_taken() {
    let (read, score) = (Phase::Read, Phase::Score);
    let workload = Table {
        num_hidden_layers: 2,
        on_cpu: [
            vec![one_row(&[(read, 100), (score, 900)], 1e9)],
            vec![
                one_row(&[(read, 500), (score, 400)], 4e9),
                one_row(&[(read, 300), (score, 200)], 9e9),
            ],
        ],
        ..Table::default()
    };
    let peak_with = |memory| {
        let policy = Policy { budget: Budget::of_cpu(ByteSize(memory)), ..Policy::default() };
        plan(&workload, &cpu_only(1 << 30), &policy).map(|plan| plan.devices[0].peak.0)
    };
    assert_eq!(peak_with(900), Ok(900));
    assert_eq!(peak_with(899), Ok(500));
    assert_eq!(peak_with(300), Ok(300));
    let shortages = shortages(peak_with(299).unwrap_err());
    let [shortage] = shortages.as_slice() else { panic!("{shortages:?}") };
    assert_eq!(
        (shortage.phase, shortage.needed, shortage.short_by()),
        (read, ByteSize(300), ByteSize(1))
    );
}

#[test]
fn without_a_budget_a_part_of_the_free_memory_is_used() {
    let workload = Table {
        num_hidden_layers: 1,
        on_cpu: [vec![one_row(&[(Phase::Read, 800)], 1.0)], Vec::new()],
        ..Table::default()
    };
    let fits = |memory| plan(&workload, &cpu_only(memory), &Policy::default()).is_ok();
    assert!(fits(1000) && !fits(999));
}

#[test]
fn an_absent_device_is_refused_by_name() {
    let policy = Policy { budget: "cuda:1=1GiB".parse().unwrap(), ..Policy::default() };
    let Err(PlanFailure::Unusable(failure)) = plan(&Table::default(), &cpu_only(1), &policy) else {
        panic!("the policy names an absent GPU")
    };
    assert!(failure.is_usage && failure.message.contains("cuda:1 is not there"), "{failure}");
}
