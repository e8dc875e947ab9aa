//! The account of a device's memory: the planned bytes of a unit of work are reserved before it begins.
//!
//! `model` and `pruning` never see the account. For the fallback ladder, a refused reservation and a refused allocation are the same
//! event. A *simulated* device knows only refused reservations. Tests can make the ledger refuse certain units.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::bytes::ByteSize;

/// A refused reservation: the device has no memory for a unit of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// The bytes that the unit needs.
    pub needed: ByteSize,
    /// The free bytes.
    pub free: ByteSize,
}

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} needed, {} free", self.needed, self.free)
    }
}

impl std::error::Error for Refused {}

/// Units to refuse, by number, and the number of refused attempts: `7` refuses every attempt of the eighth unit, `7x1,9x2` the first
/// attempt of the eighth and the first two attempts of the tenth, `all` every attempt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusals {
    all: bool,
    units: BTreeMap<u64, u32>,
}

impl FromStr for Refusals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self { all: true, units: BTreeMap::new() });
        }
        let number = |error: std::num::ParseIntError| format!("`{text}`: {error}");
        let mut units = BTreeMap::new();
        for entry in text.split(',').filter(|entry| !entry.is_empty()) {
            let (unit, attempts) = match entry.split_once('x') {
                Some((unit, attempts)) => (unit, attempts.parse().map_err(number)?),
                None => (entry, u32::MAX),
            };
            units.insert(unit.parse().map_err(number)?, attempts);
        }
        Ok(Self { all: false, units })
    }
}

/// A device's account.
#[derive(Debug)]
pub struct Ledger {
    capacity: ByteSize,
    held: ByteSize,
    peak: ByteSize,
    refusals: Refusals,
    /// Units begun, and attempts of the last unit.
    units: u64,
    attempts: u32,
}

impl Ledger {
    /// Opens an account of `capacity`, of which `held` stays reserved for the whole run.
    pub fn new(capacity: ByteSize, held: ByteSize, refusals: Refusals) -> Self {
        Self { capacity, held, peak: held, refusals, units: 0, attempts: 0 }
    }

    /// The next unit begins.
    pub fn begin_unit(&mut self) {
        self.units += 1;
        self.attempts = 0;
    }

    /// Reserves `bytes`, which must be given back.
    ///
    /// # Errors
    /// Fails when fewer bytes are free. Nothing is reserved then.
    pub fn reserve(&mut self, bytes: ByteSize) -> Result<(), Refused> {
        self.attempts += 1;
        let refused = Refused { needed: bytes, free: self.free() };
        let told_to = self.refusals.all
            || self
                .refusals
                .units
                .get(&(self.units.saturating_sub(1)))
                .is_some_and(|&attempts| self.attempts <= attempts);
        if told_to || bytes > self.free() {
            return Err(refused);
        }
        self.held = self.held + bytes;
        self.peak = self.peak.max(self.held);
        Ok(())
    }

    /// Gives reserved bytes back.
    pub fn give_back(&mut self, bytes: ByteSize) {
        self.held = ByteSize(self.held.0.saturating_sub(bytes.0));
    }

    /// Reserves bytes beyond the end of a unit, without a check.
    pub fn keep(&mut self, bytes: ByteSize) {
        self.held = self.held + bytes;
        self.peak = self.peak.max(self.held);
    }

    /// The free bytes.
    pub fn free(&self) -> ByteSize {
        ByteSize(self.capacity.0.saturating_sub(self.held.0))
    }

    /// All bytes of the account.
    pub fn capacity(&self) -> ByteSize {
        self.capacity
    }

    /// The peak of reserved bytes.
    pub fn peak(&self) -> ByteSize {
        self.peak
    }

    /// Units begun so far.
    pub fn units(&self) -> u64 {
        self.units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_is_missing_until_it_is_given_back() {
        let mut ledger = Ledger::new(ByteSize(100), ByteSize(10), Refusals::default());
        ledger.begin_unit();
        assert_eq!(ledger.reserve(ByteSize(60)), Ok(()));
        assert_eq!(
            ledger.reserve(ByteSize(31)),
            Err(Refused { needed: ByteSize(31), free: ByteSize(30) })
        );
        assert_eq!(ledger.reserve(ByteSize(30)), Ok(()));
        ledger.give_back(ByteSize(90));
        assert_eq!((ledger.free(), ledger.peak()), (ByteSize(90), ByteSize(100)));
    }

    #[test]
    fn units_are_refused_as_told() {
        let refusals: Refusals = "1,2x1".parse().unwrap();
        let mut ledger = Ledger::new(ByteSize(100), ByteSize::ZERO, refusals);
        let mut attempts = |count: usize| -> Vec<bool> {
            ledger.begin_unit();
            (0..count)
                .map(|_| {
                    let taken = ledger.reserve(ByteSize(1)).is_ok();
                    if taken {
                        ledger.give_back(ByteSize(1));
                    }
                    taken
                })
                .collect()
        };
        assert_eq!(attempts(2), [true, true]);
        assert_eq!(attempts(3), [false, false, false]);
        assert_eq!(attempts(2), [false, true]);
        assert!("x".parse::<Refusals>().is_err());
    }
}
