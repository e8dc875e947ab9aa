//! The table of a plan, which `prune plan` prints, and the line of a plan, which a run prints.

use std::fmt::Write as _;

use serde::Serialize;

use super::format::Table;
use crate::bytes::ByteSize;
use crate::run::plan::{DevicePlan, PhasePlan, TimeEstimate};
use crate::run::{Events, HiddenStatesStorage, Plan};

/// A model in the table of `prune plan --table`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TableRow {
    /// Its name.
    pub model: String,
    /// Weights in all tensors.
    pub parameters: u64,
    /// Bytes of these weights.
    pub weights: ByteSize,
    /// The hidden states of all samples and windows.
    pub hidden_states: ByteSize,
    /// The peak of a run on the CPU with enough memory.
    pub peak: ByteSize,
    /// The least memory for a run on the CPU.
    pub smallest_ram: ByteSize,
    /// The least GPU memory for a run.
    pub smallest_gpu: ByteSize,
    /// The memory of the process with the smallest GPU.
    pub ram_beside_it: ByteSize,
    /// The estimated time on the CPU with enough memory.
    pub seconds: f64,
}

/// The table, in lines of `columns` or in Markdown; ends in a newline.
pub fn table(rows: &[TableRow], columns: Option<usize>) -> String {
    let records = rows.iter().map(|row| {
        [
            ("model", row.model.clone()),
            ("parameters", format!("{:.2} billion", row.parameters as f64 / 1e9)),
            ("weights", row.weights.to_string()),
            ("hidden states", row.hidden_states.to_string()),
            ("peak on the CPU", row.peak.to_string()),
            ("time on this CPU", duration(row.seconds)),
            ("least RAM", row.smallest_ram.to_string()),
            ("least GPU memory", row.smallest_gpu.to_string()),
            ("RAM beside it", row.ram_beside_it.to_string()),
        ]
    });
    Table::of(records).shown(columns)
}

/// Parts of a phase that the table names; the sum of the phase includes all parts.
const NAMED_PARTS: usize = 3;

/// Tells a plan in a line, with its notes. The table is for users who ask for details.
pub fn announce(plan: &Plan, events: &dyn Events) {
    events.note(format!("plan         {}", line(plan)));
    for note in &plan.notes {
        events.note(format!("             {note}"));
    }
    for line in text(plan).lines() {
        events.detail(line.to_string());
    }
}

/// The peaks of all devices, hidden states on the disk, and the time.
fn line(plan: &Plan) -> String {
    let alone = plan.devices.len() == 1;
    let peak = |device: &DevicePlan| {
        let name = if alone { String::new() } else { format!("{} ", device.device) };
        let budget = device.budget.map_or_else(String::new, |budget| format!(" of {budget}"));
        format!("{name}peak {}{budget}", device.peak)
    };
    let mut facts: Vec<String> = plan.devices.iter().map(peak).collect();
    let states = &plan.hidden_states;
    if states.storage == HiddenStatesStorage::Disk && states.bytes > ByteSize::ZERO {
        facts.push(format!("hidden states {} on disk", states.bytes));
    }
    facts.push(about(plan.time.seconds));
    facts.join(", ")
}

/// Returns the table of a plan: devices, layers, hidden states, every phase with its largest parts, and the time. Ends in a newline.
pub fn text(plan: &Plan) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<14} {value}");
    };
    for device in &plan.devices {
        let of = match device.budget {
            Some(budget) => format!("of {budget}"),
            None => "(of unknown size)".to_string(),
        };
        let phase = device.peak_phase.map_or_else(String::new, |phase| format!(", in {phase}"));
        line(&device.device, format!("peak {} {of}{phase}", device.peak));
    }
    for layers in &plan.layers {
        let (first, last, weights) = (layers.first, layers.last, &layers.weights);
        let rest = if first == last { String::new() } else { format!(" to {last}") };
        let devices = layers.devices.join(" and ");
        line("layers", format!("{first}{rest} on {devices}; weights from {weights}"));
    }
    let states = &plan.hidden_states;
    if states.bytes > ByteSize::ZERO {
        let at = match states.storage {
            HiddenStatesStorage::Device => "on the GPUs",
            HiddenStatesStorage::Ram => "in RAM",
            HiddenStatesStorage::Disk => "on disk",
        };
        line("hidden states", format!("{} {at}", states.bytes));
    }
    for (index, phase) in plan.phases.iter().enumerate() {
        let is_first = index == 0 || plan.phases[index - 1].device != phase.device;
        let name = match (is_first, phase.device.as_str()) {
            (true, "cpu") => "memory",
            (true, _) => "GPU memory",
            (false, _) => "",
        };
        line(name, format!("{:<16} {:>10}  {}", phase.phase, phase.bytes, parts(phase)));
    }
    line("time", time(&plan.time));
    for note in &plan.notes {
        line("note", note.clone());
    }
    text
}

/// The largest parts, in words.
fn parts(phase: &PhasePlan) -> String {
    let mut parts: Vec<_> = phase.parts.iter().filter(|part| part.bytes > ByteSize::ZERO).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let named = parts.iter().take(NAMED_PARTS);
    named.map(|part| format!("{} {}", part.kind, part.bytes)).collect::<Vec<_>>().join(", ")
}

fn time(time: &TimeEstimate) -> String {
    let transfers = match time.transfers > 0.0 {
        true => format!(", transfers {}", duration(time.transfers)),
        false => String::new(),
    };
    let [compute, disk] = [time.compute, time.disk].map(duration);
    let whole = about(time.seconds);
    format!("{whole}: computing {compute}, disk {disk}{transfers}; some of them overlap")
}

/// An estimated duration. "about less than" is no estimate.
fn about(seconds: f64) -> String {
    let about = if seconds < LEAST_SECONDS { "" } else { "about " };
    format!("{about}{}", duration(seconds))
}

/// Seconds below which no number is written.
const LEAST_SECONDS: f64 = 1.0;

/// Writes a duration with two digits in a fitting unit.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < LEAST_SECONDS => "less than a second".to_string(),
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 90.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s if s < 48.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit_a_person_would_choose() {
        let texts = [0.2, 5.4, 300.0, 7200.0, 300_000.0].map(duration);
        assert_eq!(texts, ["less than a second", "5 s", "5 min", "2.0 h", "3.5 days"]);
    }
}
