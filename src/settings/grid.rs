//! Settings of `prune sweep`: a grid of pruning runs.

use super::run::Settings;
use crate::failure::Failure;
use crate::pipeline::Selection;
use crate::run::metric::Metric;

/// Settings of `prune sweep`.
#[derive(Debug, Clone)]
pub struct GridSettings {
    /// The settings that all cells share. Its `--save` folder is the sweep's; method, target and seed are replaced.
    pub run: Settings,
    /// `--methods`.
    pub methods: Vec<String>,
    /// `--ratios`, then the N:M patterns of `--types`.
    pub targets: Vec<Selection>,
    /// `--seeds`.
    pub seeds: Vec<u64>,
    /// `--shard`.
    pub shard: GridShard,
    /// `--metrics`.
    pub metrics: Vec<Metric>,
}

/// `--shard i/n`: the part of the cells that a process works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridShard {
    /// i, from 1.
    pub number: usize,
    /// n.
    pub of: usize,
}

/// The way in which cells are dealt out to shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardOrder {
    /// Every n-th cell.
    InTurn,
    /// Cells in a row, of as few seeds as possible: cells of the same seed share their statistics.
    InARow,
}

impl GridShard {
    /// All cells.
    pub const WHOLE: Self = Self { number: 1, of: 1 };

    /// The shard of a rank among `of` ranks.
    pub fn of_rank(rank: usize, of: usize) -> Self {
        Self { number: rank + 1, of }
    }

    /// Returns whether the cell at this position, from 0, of `cells` belongs to the shard.
    pub fn has(self, position: usize, cells: usize, deal: ShardOrder) -> bool {
        let shard = match deal {
            ShardOrder::InTurn => position % self.of,
            ShardOrder::InARow => position * self.of / cells.max(1),
        };
        shard == self.number - 1
    }
}

impl std::str::FromStr for GridShard {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let refused = |why: String| {
            Failure::usage(format!("--shard {text}: {why}")).hint(
                "write i/n with i from 1 to n, like --shard 2/4 for the second of four processes",
            )
        };
        let parts = text.split_once('/');
        let numbers = parts
            .and_then(|(number, of)| Some((number.trim().parse().ok()?, of.trim().parse().ok()?)));
        let (number, of): (usize, usize) =
            numbers.ok_or_else(|| refused("it is not of the form i/n".to_string()))?;
        if number == 0 || number > of {
            return Err(refused(format!("there is no shard {number} of {of}")));
        }
        Ok(Self { number, of })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_all_cells_and_share_none() {
        let shards: Vec<GridShard> = ["1/3", "2/3", "3/3"].map(|s| s.parse().unwrap()).to_vec();
        for deal in [ShardOrder::InTurn, ShardOrder::InARow] {
            let has = |shard: &GridShard, position| shard.has(position, 20, deal);
            for position in 0..20 {
                assert_eq!(shards.iter().filter(|s| has(s, position)).count(), 1);
            }
            assert!((0..20).all(|position| has(&GridShard::WHOLE, position)));
            let sizes = shards.iter().map(|s| (0..20).filter(|&at| has(s, at)).count());
            assert_eq!(sizes.collect::<Vec<_>>(), [7, 7, 6], "{deal:?}");
        }
        let in_a_row = |position| shards[1].has(position, 20, ShardOrder::InARow);
        assert_eq!(
            (0..20).filter(|&at| in_a_row(at)).collect::<Vec<_>>(),
            [7, 8, 9, 10, 11, 12, 13]
        );
        for text in ["0/2", "3/2", "1", "a/2", "1/0", "-1/2"] {
            let failure = text.parse::<GridShard>().unwrap_err();
            assert!(failure.is_usage && failure.message.contains(text), "{failure}");
        }
    }
}
