//! The memory log of the Python original: `memory_log.csv` with the same columns, a line per checkpoint, and a summary.
//!
//! As in the original, columns are named GB and hold GiB. GPU columns are counters of the driver's pool, added over all GPUs; 0 on
//! the CPU. `CPU_Used_GB` is the resident anonymous memory of this process, `CPU_Percent` its share of the machine's memory.
//! `CPU_Peak_GB`, the peak since the row before, is not in the original and stands last.

use std::fmt::Write as _;

use super::format::timestamp;
use crate::bytes::ByteSize;
use crate::run::manifest::MemorySample;

/// The first line of the file.
pub const CSV_HEADER: &str = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent,CPU_Peak_GB\n";

/// A line of the file. The time is UTC.
pub fn csv_row(
    sample: &MemorySample,
    started_unix_seconds: u64,
    total: Option<ByteSize>,
) -> String {
    let gpu = sample.gpu.unwrap_or_default();
    let [allocated, reserved, gpu_peak] =
        [gpu.allocated, gpu.reserved, gpu.peak].map(ByteSize::gib);
    let [used, peak] = [sample.anonymous, sample.peak_anonymous].map(ByteSize::gib);
    let time = timestamp(started_unix_seconds + sample.seconds as u64);
    let (checkpoint, percent) = (&sample.checkpoint, percent(sample.anonymous, total));
    format!(
        "{time},{checkpoint},{allocated:.3},{reserved:.3},{gpu_peak:.3},{used:.3},{percent:.2},{peak:.3}\n"
    )
}

/// The line printed at a checkpoint.
pub fn line(sample: &MemorySample, total: Option<ByteSize>) -> String {
    let [used, peak] = [sample.anonymous, sample.peak_anonymous].map(ByteSize::gib);
    let (checkpoint, percent) = (&sample.checkpoint, percent(sample.anonymous, total));
    let cpu =
        format!("memory {checkpoint:<20} {used:.3} GiB used ({percent:.2} %), peak {peak:.3} GiB");
    let Some(gpu) = sample.gpu else {
        return cpu;
    };
    let [allocated, reserved, peak, free, total] =
        [gpu.allocated, gpu.reserved, gpu.peak, gpu.free, gpu.total].map(ByteSize::gib);
    format!(
        "{cpu}; GPU {allocated:.3} GiB allocated, {reserved:.3} reserved, {peak:.3} peak, {free:.3} free of {total:.3}"
    )
}

/// The table at the end, ending in a newline.
pub fn summary(samples: &[MemorySample], total: Option<ByteSize>) -> String {
    let rule = "=".repeat(80);
    let has_gpu = samples.iter().any(|sample| sample.gpu.is_some());
    let mut text = format!("{rule}\nMEMORY USAGE SUMMARY (GiB)\n{rule}\n{:<30} ", "Checkpoint");
    if has_gpu {
        let _ = write!(text, "{:>10} {:>10} ", "GPU Alloc", "GPU Peak");
    }
    let _ =
        writeln!(text, "{:>12} {:>12} {:>12}\n{}", "CPU Used", "CPU Peak", "CPU %", "-".repeat(80));
    for sample in samples {
        // Writing to a String cannot fail.
        let _ = write!(text, "{:<30} ", sample.checkpoint);
        if has_gpu {
            let gpu = sample.gpu.unwrap_or_default();
            let [allocated, peak] = [gpu.allocated, gpu.peak].map(ByteSize::gib);
            let _ = write!(text, "{allocated:>10.3} {peak:>10.3} ");
        }
        let [used, peak] = [sample.anonymous, sample.peak_anonymous].map(ByteSize::gib);
        let percent = percent(sample.anonymous, total);
        let _ = writeln!(text, "{used:>12.3} {peak:>12.3} {percent:>12.2}");
    }
    let of_gpus = samples.iter().filter_map(|sample| sample.gpu);
    if let Some(peak) = of_gpus.map(|gpu| gpu.peak).max() {
        let _ = writeln!(text, "{rule}\nPeak GPU Memory: {:.3} GiB", peak.gib());
    }
    let peak = samples.iter().map(|sample| sample.peak_anonymous).max().unwrap_or_default();
    let _ = writeln!(text, "{rule}\nPeak CPU Memory: {:.3} GiB\n{rule}", peak.gib());
    text
}

fn percent(bytes: ByteSize, total: Option<ByteSize>) -> f64 {
    total.map_or(f64::NAN, |total| 100.0 * bytes.0 as f64 / total.0 as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_columns_of_the_original_and_the_peak_last() {
        let sample = MemorySample {
            seconds: 30.7,
            checkpoint: "02_model_loaded".to_string(),
            anonymous: ByteSize(1 << 29),
            peak_anonymous: ByteSize(3 << 29),
            gpu: None,
        };
        let row = csv_row(&sample, 1_766_880_900, Some(ByteSize(1 << 34)));
        assert_eq!(row, "2025-12-28T00:15:30,02_model_loaded,0.000,0.000,0.000,0.500,3.12,1.500\n");
        assert_eq!(row.split(',').count(), CSV_HEADER.split(',').count());
        assert!(summary(&[sample], None).contains("Peak CPU Memory: 1.500 GiB"));
    }
}
