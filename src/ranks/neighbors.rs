//! The ranks of one machine, which divide its processors and its memory among them.

use serde::{Deserialize, Serialize};

/// The share of this rank in its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbors {
    /// The ranks of this machine, this rank included.
    pub ranks: usize,
    /// The ranks that may use the same processors, this rank included.
    pub sharing_processors: usize,
}

impl Default for Neighbors {
    fn default() -> Self {
        Self { ranks: 1, sharing_processors: 1 }
    }
}

/// The place of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankPlace {
    host: String,
    /// The processors that the rank may use, as Linux prints them.
    processors: String,
}

/// The name of this machine; empty on systems that do not tell it in a file.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}

impl RankPlace {
    /// The place of this process.
    pub(super) fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let status = read("/proc/self/status");
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        Self { host: host(), processors: allowed.unwrap_or_default().trim().to_string() }
    }
}

impl Neighbors {
    /// The share of rank `rank` among ranks with these places.
    pub(super) fn among(places: &[RankPlace], rank: usize) -> Self {
        let own = &places[rank];
        let of_machine = || places.iter().filter(|place| place.host == own.host);
        let sharing = of_machine().filter(|place| place.processors == own.processors);
        Self { ranks: of_machine().count(), sharing_processors: sharing.count() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_machine_are_counted_by_host_and_by_processors() {
        let place = |host: &str, processors: &str| RankPlace {
            host: host.to_string(),
            processors: processors.to_string(),
        };
        let places = [place("a", "0-3"), place("a", "0-3"), place("a", "4-7"), place("b", "0-3")];
        let found = |rank| Neighbors::among(&places, rank);
        assert_eq!(found(0), Neighbors { ranks: 3, sharing_processors: 2 });
        assert_eq!(found(2), Neighbors { ranks: 3, sharing_processors: 1 });
        assert_eq!(found(3), Neighbors::default());
    }
}
