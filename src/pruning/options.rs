//! Options of pruning methods: the numbers a user may set, and which method reads which.

use serde::Serialize;

use crate::failure::Failure;

/// Damping of SparseGPT, as in the reference.
const PERCDAMP: f64 = 0.01;
/// Columns of a block of SparseGPT, as in the reference.
const BLOCKSIZE: usize = 128;
/// Swaps per row of DSnoT, as in the reference.
const DSNOT_CYCLES: usize = 50;

/// The options that are set; `None` is the method's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MethodOptions {
    /// `--percdamp`: the damping of the Gram matrix, as a fraction of the mean of its diagonal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percdamp: Option<f64>,
    /// `--blocksize`: columns that are pruned together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocksize: Option<usize>,
    /// `--dsnot-cycles`: swaps per row, at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dsnot_cycles: Option<usize>,
    /// `--dsnot-mlp`: the matrices of the MLP are refined, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dsnot_mlp: bool,
}

/// An option that a method may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MethodOption {
    /// `--percdamp`.
    Percdamp,
    /// `--blocksize`.
    Blocksize,
    /// `--dsnot-cycles`.
    DsnotCycles,
    /// `--dsnot-mlp`.
    DsnotMlp,
}

impl MethodOption {
    /// The flag.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Percdamp => "--percdamp",
            Self::Blocksize => "--blocksize",
            Self::DsnotCycles => "--dsnot-cycles",
            Self::DsnotMlp => "--dsnot-mlp",
        }
    }
}

impl MethodOptions {
    /// The damping.
    pub fn percdamp(&self) -> f64 {
        self.percdamp.unwrap_or(PERCDAMP)
    }

    /// Columns of a block.
    pub fn blocksize(&self) -> usize {
        self.blocksize.unwrap_or(BLOCKSIZE)
    }

    /// Swaps per row, at most.
    pub fn dsnot_cycles(&self) -> usize {
        self.dsnot_cycles.unwrap_or(DSNOT_CYCLES)
    }

    /// The options that are set.
    fn given(&self) -> Vec<MethodOption> {
        let percdamp = self.percdamp.map(|_| MethodOption::Percdamp);
        let blocksize = self.blocksize.map(|_| MethodOption::Blocksize);
        let cycles = self.dsnot_cycles.map(|_| MethodOption::DsnotCycles);
        let mlp = self.dsnot_mlp.then_some(MethodOption::DsnotMlp);
        let all = [percdamp, blocksize, cycles, mlp];
        all.into_iter().flatten().collect()
    }

    /// The options among `read`.
    #[must_use]
    pub fn only(&self, read: &[MethodOption]) -> Self {
        let reads = |option| read.contains(&option);
        Self {
            percdamp: self.percdamp.filter(|_| reads(MethodOption::Percdamp)),
            blocksize: self.blocksize.filter(|_| reads(MethodOption::Blocksize)),
            dsnot_cycles: self.dsnot_cycles.filter(|_| reads(MethodOption::DsnotCycles)),
            dsnot_mlp: self.dsnot_mlp && reads(MethodOption::DsnotMlp),
        }
    }

    /// Checks the values, and that `read` names every option that is set.
    ///
    /// # Errors
    /// Fails with the flag, for `method` in its message.
    pub fn check(&self, method: &str, read: &[MethodOption]) -> Result<(), Failure> {
        if let Some(option) = self.given().into_iter().find(|option| !read.contains(option)) {
            let flag = option.flag();
            return Err(Failure::usage(format!("{method} does not read {flag}"))
                .hint(format!("leave {flag} out, or choose another --prune-method or --refine")));
        }
        let percdamp = self.percdamp();
        if !(percdamp.is_finite() && percdamp >= 0.0) {
            return Err(Failure::usage(format!("--percdamp is {percdamp}"))
                .hint("use a number from 0 on, like 0.01"));
        }
        if self.blocksize() == 0 {
            return Err(Failure::usage("--blocksize is 0").hint("use a number from 1 on, like 128"));
        }
        Ok(())
    }
}
