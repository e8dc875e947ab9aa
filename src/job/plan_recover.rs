//! `prune plan --recover`: the memory of trainings, from headers or published shapes alone.
//!
//! Every row is the plan that `prune recover` makes with its defaults, but for rank and batch size, and without evaluation: with
//! unlimited memory but no layer that stays in it, and with the least memory that works. A quantised base changes the files alone:
//! layers are read from it in their own dtype.

use anyhow::Result;

use super::plan::{Subject, inventory, run_shape};
use super::recover::Recovery;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::model::shapes::SHAPES;
use crate::pipeline::RunShape;
use crate::placement::{Policy, planner};
use crate::quantized::FourBitFormat;
use crate::report::training_plan::TrainingRow;
use crate::run::Events;
use crate::settings::{NSAMPLES, PlanSettings, PlanSubject, RecoverySettings, RecoveryWay};

/// Trainings of the table: way, optimizer, format of the base.
const TRAININGS: [(RecoveryWay, &str, Option<FourBitFormat>); 7] = [
    (RecoveryWay::Blocks, "adamw", None),
    (RecoveryWay::Lora, "adamw", None),
    (RecoveryWay::Lora, "adamw8bit", None),
    (RecoveryWay::Lora, "paged-adamw8bit", Some(FourBitFormat::Nf4Double)),
    (RecoveryWay::Full, "adamw", None),
    (RecoveryWay::Full, "paged-adamw32bit", None),
    (RecoveryWay::Full, "paged-adamw8bit", None),
];

/// Plans the trainings of the models of the settings.
///
/// # Errors
/// Fails when headers cannot be read, and for a rank that a model has no room for.
pub fn training_table(settings: &PlanSettings, events: &dyn Events) -> Result<Vec<TrainingRow>> {
    let subjects = match &settings.subject {
        PlanSubject::Table => SHAPES.iter().map(Subject::of).collect::<Result<_>>()?,
        _ => vec![Subject::of_settings(settings, events)?],
    };
    let mut machine = inventory(settings)?;
    machine.cpu.memory = None;
    machine.gpus.clear();
    let mut rows = Vec::new();
    for subject in &subjects {
        for (how, optim, base_quant) in TRAININGS {
            let own = RecoverySettings::of(how);
            let asked = RecoverySettings {
                optim: optim.to_string(),
                base_quant,
                rank: settings.rank.unwrap_or(own.rank),
                batch_size: settings.batch_size.unwrap_or(own.batch_size),
                ..own
            };
            let recovery = Recovery::of(&asked, (&subject.config, 0.0), None)?;
            let run = training_run(settings, subject, &recovery, machine.cpu.threads)?;
            let plan = planner::plan(&run, &machine, &Policy::default())
                .map_err(|_| Failure::new("a plan without limits does not fit"))?;
            let cpu = plan.cpu();
            let [paged, base] = recovery.offloaded(&subject.config, subject.dtypes.layers);
            rows.push(TrainingRow {
                model: subject.name.clone(),
                how: how.name(),
                optimizer: optim,
                base_quant: base_quant.map(FourBitFormat::name),
                trained: recovery.trained_parameters(&subject.config),
                peak: cpu.map(|cpu| cpu.peak).unwrap_or_default(),
                peak_phase: cpu.and_then(|cpu| cpu.peak_phase),
                least: planner::least_that_works(&run).cpu,
                seconds: plan.time.seconds,
                files: ByteSize(paged.0 + base.0),
            });
        }
    }
    Ok(rows)
}

/// The run of a training in numbers, without evaluation.
fn training_run<'a>(
    settings: &PlanSettings,
    subject: &'a Subject,
    recovery: &Recovery,
    threads: usize,
) -> Result<RunShape<'a>> {
    let shape = run_shape(settings, subject, threads)?;
    let samples = if recovery.is_whole() { 0 } else { NSAMPLES as usize };
    let mut trains = recovery.shape(&shape, samples, 1);
    if recovery.is_whole() {
        let (of, held_out) = (&recovery.settings, recovery.settings.held_out);
        let trained = of.steps.unwrap_or(1) as usize * of.per_step();
        trains.known_examples(trained + held_out, held_out);
    }
    Ok(RunShape { samples, windows: 0, sides: &[], technique: None, trains: Some(trains), ..shape })
}
