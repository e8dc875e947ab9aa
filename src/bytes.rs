//! Byte counts: printed in binary units ("1.50 GiB"), parsed from "24GiB", added without overflow.
//!
//! Every amount of memory or disk in plans, errors and reports is a [`ByteSize`], so that units cannot be mixed up.

use std::fmt;
use std::iter::Sum;
use std::ops::Add;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Bytes as lower-case hexadecimal digits: how hashes are written.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// A number of bytes. Sums saturate at `u64::MAX`, which no machine has.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// The bytes of `count` things of `each` bytes.
    pub fn of(count: usize, each: usize) -> Self {
        Self((count as u64).saturating_mul(each as u64))
    }

    /// The value in GiB, for tables.
    pub fn gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }

    /// The value in MiB, for tables.
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }
}

impl Add for ByteSize {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for ByteSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] = [
            ("TiB", 1 << 40),
            ("GiB", 1 << 30),
            ("MiB", 1 << 20),
            ("KiB", 1 << 10),
        ];
        for (unit, bytes) in UNITS {
            if self.0 >= bytes {
                let text = format!("{:.2} {unit}", self.0 as f64 / bytes as f64);
                return f.pad(&text);
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

impl FromStr for ByteSize {
    type Err = Failure;

    /// Reads "24GiB", "1.5 GB" (powers of 1000) or a plain number of bytes, in any case but
    /// for the `B`: "40Gb" is refused: elsewhere it means bits.
    fn from_str(text: &str) -> Result<Self, Failure> {
        let bad = |why: &str| {
            Failure::usage(format!("`{text}` is not an amount of memory: {why}"))
                .hint("write it like 24GiB, 512MiB or 10GB")
        };
        let trimmed = text.trim();
        let split = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..split], trimmed[split..].trim());
        if unit.len() == 2 && unit.ends_with('b') {
            return Err(bad("a lower-case `b` means bits elsewhere"));
        }
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(bad("the unit is unknown")),
        };
        let value: f64 = number.parse().map_err(|_| bad("it has no number"))?;
        let bytes = value * factor as f64;
        if !(0.0..=u64::MAX as f64 / 2.0).contains(&bytes) {
            return Err(bad("it is too large"));
        }
        Ok(Self(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print_in_binary_units() {
        assert_eq!(ByteSize(3 << 29).to_string(), "1.50 GiB");
        assert_eq!(ByteSize(1023).to_string(), "1023 B");
        assert_eq!(ByteSize(1 << 20).to_string(), "1.00 MiB");
    }

    #[test]
    fn sizes_parse_both_families_of_units_and_refuse_bits() {
        assert_eq!("24GiB".parse(), Ok(ByteSize(24 << 30)));
        assert_eq!("1.5 GB".parse(), Ok(ByteSize(1_500_000_000)));
        assert_eq!("77".parse(), Ok(ByteSize(77)));
        assert!(
            "40Gb"
                .parse::<ByteSize>()
                .is_err_and(|failure| failure.message.contains("bits"))
        );
        assert!("GiB".parse::<ByteSize>().is_err());
        assert!("1e400GiB".parse::<ByteSize>().is_err());
    }

    #[test]
    fn sums_saturate() {
        assert_eq!(ByteSize(u64::MAX) + ByteSize(1), ByteSize(u64::MAX));
        assert_eq!(
            [ByteSize(1), ByteSize(2)].into_iter().sum::<ByteSize>(),
            ByteSize(3)
        );
    }
}
