//! Properties of every plan, on random numbers. What plans of real models look like is pinned in `pipeline/plan_tests.rs`.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::placement::inventory::{Cpu, Gpu};
use crate::placement::workload::Work;
use crate::run::memory_settings::MemorySettings;
use crate::run::plan::Part;

fn need(phase: &'static str, parts: Vec<u64>) -> Need {
    let part = |bytes| Part {
        what: "part".into(),
        bytes: ByteSize(bytes),
    };
    Need {
        phase,
        parts: parts.into_iter().map(part).collect(),
    }
}

/// Bytes from none to more than can be added up.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..1000u64,
        0..1u64 << 40,
        Just(u64::MAX),
        Just(u64::MAX / 2)
    ]
}

fn way(on_gpu: bool) -> impl Strategy<Value = Way> {
    let needs = || vec(vec(bytes(), 0..3), 1..3);
    let amount = || prop_oneof![Just(0.0), 0.0..1e18];
    (
        needs(),
        needs(),
        any::<bool>(),
        any::<bool>(),
        [amount(), amount(), amount(), amount(), amount(), amount()],
    )
        .prop_map(move |(host, device, prefetch, in_ram, amounts)| Way {
            settings: MemorySettings {
                prefetch,
                ..MemorySettings::default()
            },
            storage: if in_ram {
                HiddenStatesStorage::Ram
            } else {
                HiddenStatesStorage::Disk
            },
            hidden_states: ByteSize(1),
            host: host.into_iter().map(|parts| need("a", parts)).collect(),
            device: if on_gpu {
                device.into_iter().map(|parts| need("b", parts)).collect()
            } else {
                Vec::new()
            },
            work: Work {
                layer_flop: amounts[0],
                layer_read: amounts[1],
                layer_moved: amounts[2],
                layer_uploaded: amounts[3],
                layer_states: amounts[4],
                once_flop: amounts[5],
                once_moved: amounts[0],
            },
        })
}

fn workload() -> impl Strategy<Value = Workload> {
    (1..200usize, vec(way(false), 1..5), vec(way(true), 0..5)).prop_map(
        |(num_hidden_layers, on_cpu, on_gpu)| Workload {
            num_hidden_layers,
            on_cpu,
            on_gpu,
            layer: ByteSize(1000),
        },
    )
}

fn machine() -> impl Strategy<Value = Inventory> {
    (bytes(), vec(bytes(), 0..4), 1..64usize).prop_map(|(memory, gpus, threads)| Inventory {
        cpu: Cpu {
            memory: Some(ByteSize(memory)),
            threads,
        },
        gpus: gpus
            .into_iter()
            .map(|memory| Gpu {
                name: String::new(),
                memory: ByteSize(memory),
            })
            .collect(),
        rates: Rates::default(),
    })
}

fn map() -> impl Strategy<Value = DeviceMap> {
    prop_oneof![
        Just(DeviceMap::Auto),
        Just(DeviceMap::Balanced),
        Just(DeviceMap::Sequential)
    ]
}

/// The shortages of a workload that does not fit.
fn shortages(failure: PlanFailure) -> Vec<Shortage> {
    match failure {
        PlanFailure::DoesNotFit(shortages) => shortages,
        PlanFailure::Unusable(failure) => panic!("{failure}"),
    }
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

fn one_way(needs: &[(&'static str, u64)], storage: HiddenStatesStorage, flop: f64) -> Way {
    Way {
        settings: MemorySettings::default(),
        storage,
        hidden_states: ByteSize(0),
        host: needs
            .iter()
            .map(|(phase, bytes)| need(phase, vec![*bytes]))
            .collect(),
        device: Vec::new(),
        work: Work {
            layer_flop: flop,
            ..Work::default()
        },
    }
}

fn cpu_only(memory: u64) -> Inventory {
    Inventory {
        cpu: Cpu {
            memory: Some(ByteSize(memory)),
            threads: 1,
        },
        gpus: Vec::new(),
        rates: Rates::default(),
    }
}

#[test]
fn the_fastest_way_that_fits_is_taken() {
    let workload = Workload {
        num_hidden_layers: 2,
        on_cpu: vec![
            one_way(&[("a", 100), ("b", 900)], HiddenStatesStorage::Ram, 1e9),
            one_way(&[("a", 500), ("b", 400)], HiddenStatesStorage::Disk, 4e9),
            one_way(&[("a", 300), ("b", 200)], HiddenStatesStorage::Disk, 9e9),
        ],
        ..Workload::default()
    };
    let peak_with = |memory| {
        let policy = Policy {
            budget: Budget::of_cpu(ByteSize(memory)),
            ..Policy::default()
        };
        plan(&workload, &cpu_only(1 << 30), &policy).map(|plan| plan.devices[0].peak.0)
    };
    assert_eq!(peak_with(900), Ok(900));
    assert_eq!(peak_with(899), Ok(500));
    assert_eq!(peak_with(300), Ok(300));
    let shortages = shortages(peak_with(299).unwrap_err());
    let [shortage] = shortages.as_slice() else {
        panic!("{shortages:?}")
    };
    assert_eq!(
        (shortage.phase, shortage.needed, shortage.short_by()),
        ("a", ByteSize(300), ByteSize(1))
    );
}

#[test]
fn where_nothing_was_said_a_part_of_what_is_free_is_used() {
    let workload = Workload {
        num_hidden_layers: 1,
        on_cpu: vec![one_way(&[("a", 800)], HiddenStatesStorage::Ram, 1.0)],
        ..Workload::default()
    };
    let fits = |memory| plan(&workload, &cpu_only(memory), &Policy::default()).is_ok();
    assert!(fits(1000) && !fits(999));
}

#[test]
fn a_device_that_is_not_there_is_refused_by_name() {
    let policy = Policy {
        budget: "cuda:1=1GiB".parse().unwrap(),
        ..Policy::default()
    };
    let Err(PlanFailure::Unusable(failure)) = plan(&Workload::default(), &cpu_only(1), &policy)
    else {
        panic!("the policy names an absent GPU")
    };
    assert!(
        failure.is_usage && failure.message.contains("cuda:1 is not there"),
        "{failure}"
    );
}
