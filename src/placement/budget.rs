//! `--max-memory`: the usable memory of each device.
//!
//! The grammar is taken from accelerate's `max_memory`, as in `cuda:0=10GiB,cpu=24GiB`. Devices are `cuda:N` (or the bare number) and
//! `cpu`, amounts are powers of 1024 (GiB, MiB) or of 1000 (GB, MB). If any GPU is named, only the named GPUs are used. The CPU keeps its
//! default unless it is named, since the program itself needs its memory. An amount without a device is the CPU's. The CUDA context
//! counts as part of a GPU's amount.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The given limits. A device without a limit has its default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Budget {
    cpu: Option<ByteSize>,
    gpus: BTreeMap<usize, ByteSize>,
}

impl Budget {
    /// A limit on the CPU's memory alone.
    pub fn of_cpu(limit: ByteSize) -> Self {
        Self { cpu: Some(limit), gpus: BTreeMap::new() }
    }

    /// The limit on the process's memory; `None` without a limit.
    pub fn cpu(&self) -> Option<ByteSize> {
        self.cpu
    }

    /// The limit on GPU `index`: `None` if no GPU is named at all, zero if GPUs are named but not this GPU.
    pub fn gpu(&self, index: usize) -> Option<ByteSize> {
        if self.gpus.is_empty() {
            return None;
        }
        Some(self.gpus.get(&index).copied().unwrap_or_default())
    }

    /// The named GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = usize> {
        self.gpus.keys().copied()
    }

    /// The same budget with `limit` on the CPU, for advice.
    #[must_use]
    pub fn with_cpu(&self, limit: ByteSize) -> Self {
        Self { cpu: Some(limit), ..self.clone() }
    }
}

impl fmt::Display for Budget {
    /// Writes the flag's value, in whole MiB rounded up.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |size: &ByteSize| format!("{}MiB", size.0.div_ceil(1 << 20));
        let gpus = self.gpus.iter().map(|(index, size)| format!("cuda:{index}={}", mib(size)));
        let cpu = self.cpu.iter().map(|size| format!("cpu={}", mib(size)));
        f.write_str(&gpus.chain(cpu).collect::<Vec<_>>().join(","))
    }
}

impl FromStr for Budget {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let bad = |why: String| {
            Failure::usage(format!("--max-memory {text}: {why}"))
                .hint("write it like --max-memory cpu=24GiB or --max-memory cuda:0=10GiB,cpu=24GiB")
        };
        let mut budget = Self::default();
        for part in text.split(',') {
            let (device, amount) = part.split_once('=').unwrap_or(("cpu", part));
            let (device, amount) = (device.trim(), amount.trim());
            // accelerate reads a number without a unit as bytes. In a typed command the unit is nearly always forgotten.
            if amount.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') && amount != "0" {
                return Err(bad(format!("`{amount}` has no unit")));
            }
            let size: ByteSize = amount.parse().map_err(|failure: Failure| bad(failure.message))?;
            let is_new = match device {
                "cpu" => budget.cpu.replace(size).is_none(),
                _ => {
                    let index = device.strip_prefix("cuda:").unwrap_or(device);
                    let index: usize = index.parse().map_err(|_| {
                        bad(format!(
                            "`{device}` is not a device; they are cpu and cuda:0, cuda:1, …"
                        ))
                    })?;
                    budget.gpus.insert(index, size).is_none()
                }
            };
            if !is_new {
                return Err(bad(format!("`{device}` is named twice")));
            }
        }
        Ok(budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_of_accelerate_is_read() {
        let budget: Budget = "cuda:0=10GiB, 1=24GB,cpu=1.5GiB".parse().unwrap();
        assert_eq!(budget.gpu(0), Some(ByteSize(10 << 30)));
        assert_eq!(budget.gpu(1), Some(ByteSize(24_000_000_000)));
        assert_eq!(budget.gpu(2), Some(ByteSize::ZERO), "not named, not used");
        assert_eq!(budget.cpu(), Some(ByteSize(3 << 29)));
        assert_eq!("cpu=1GiB".parse::<Budget>().unwrap().gpu(0), None);
        let bare: Budget = "8GB".parse().unwrap();
        assert_eq!((bare.cpu(), bare.gpu(0)), (Some(ByteSize(8_000_000_000)), None));
    }

    #[test]
    fn what_is_not_an_amount_is_refused_with_an_example() {
        for (text, why) in [
            ("cuda:0", "the unit is unknown"),
            ("40", "no unit"),
            ("1GiB,cpu=2GiB", "twice"),
            ("cpu=40Gb", "bits"),
            ("cpu=40", "no unit"),
            ("tpu=1GiB", "not a device"),
            ("cpu=1GiB,cpu=2GiB", "twice"),
            ("cpu=GiB", "no number"),
        ] {
            let failure = text.parse::<Budget>().unwrap_err();
            assert!(failure.is_usage && failure.message.contains(why), "{failure}");
            assert!(failure.hint.is_some_and(|hint| hint.contains("cpu=24GiB")));
        }
    }

    #[test]
    fn a_budget_prints_as_it_can_be_typed() {
        let budget: Budget = "cpu=1.5GiB,cuda:1=3GB".parse().unwrap();
        assert_eq!(budget.to_string(), "cuda:1=2862MiB,cpu=1536MiB");
        let read: Budget = budget.to_string().parse().unwrap();
        assert!(read.cpu() == budget.cpu() && read.gpu(1) >= budget.gpu(1));
    }
}
