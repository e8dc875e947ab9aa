//! Rates of networks and of storage, as flags give them: bits per second (`25Gb/s`) or bytes per second (`2GB/s`).

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;
use crate::failure::Failure;

/// Bytes per second, above zero.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Rate(f64);

impl Rate {
    /// Seconds that this many bytes take.
    pub fn seconds(self, bytes: f64) -> f64 {
        bytes / self.0
    }

    /// 10⁹ bytes per second.
    pub fn gigabytes(self) -> f64 {
        self.0 / 1e9
    }
}

impl FromStr for Rate {
    type Err = Failure;

    /// Reads bits per second (kb/s, Mb/s, Gb/s, Tb/s) or an amount of bytes per second, as [`ByteSize`] reads it.
    fn from_str(text: &str) -> Result<Self, Failure> {
        let bad = |why: &str| {
            Failure::usage(format!("`{text}` is not a rate: {why}"))
                .hint("write it like 25Gb/s (bits) or 2GB/s (bytes)")
        };
        let amount =
            text.trim().strip_suffix("/s").ok_or_else(|| bad("it does not end in `/s`"))?;
        let bits = [("kb", 1e3), ("Mb", 1e6), ("Gb", 1e9), ("Tb", 1e12)].into_iter();
        let mut bits = bits.filter_map(|(unit, factor)| {
            let number = amount.strip_suffix(unit)?.trim().parse::<f64>().ok()?;
            Some(number * factor / 8.0)
        });
        let rate = match bits.next() {
            Some(rate) => rate,
            None => {
                amount.parse::<ByteSize>().map_err(|_| bad("its unit or number is unknown"))?.0
                    as f64
            }
        };
        match rate > 0.0 && rate.is_finite() {
            true => Ok(Self(rate)),
            false => Err(bad("it is not above zero")),
        }
    }
}

impl Display for Rate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} GB/s", self.gigabytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_bytes_are_told_apart() {
        let gigabytes = |text: &str| text.parse::<Rate>().unwrap().gigabytes();
        assert_eq!(gigabytes("25Gb/s"), 3.125);
        assert_eq!(gigabytes("2GB/s"), 2.0);
        assert_eq!(gigabytes("800 Mb/s"), 0.1);
        assert_eq!(gigabytes("1GiB/s"), 1.073741824);
        for bad in ["", "25", "25Gb", "0Gb/s", "fast/s", "-1GB/s", "25gbit/s"] {
            let error = bad.parse::<Rate>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{bad}` is not a rate")), "{error}");
        }
    }
}
