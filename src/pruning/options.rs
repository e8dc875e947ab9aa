//! Options of pruning methods: the numbers a user may set, and which method reads which.

use serde::Serialize;

use crate::failure::Failure;

/// Damping of SparseGPT, as in the reference.
const PERCDAMP: f64 = 0.01;
/// Columns of a block of SparseGPT, as in the reference.
const BLOCKSIZE: usize = 128;

/// The options that are set; `None` is the method's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MethodOptions {
    /// `--percdamp`: the damping of the Gram matrix, as a fraction of the mean of its diagonal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percdamp: Option<f64>,
    /// `--blocksize`: columns that are pruned together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocksize: Option<usize>,
}

/// An option that a method may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MethodOption {
    /// `--percdamp`.
    Percdamp,
    /// `--blocksize`.
    Blocksize,
}

impl MethodOption {
    /// The flag.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Percdamp => "--percdamp",
            Self::Blocksize => "--blocksize",
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

    /// The options that are set.
    fn given(&self) -> Vec<MethodOption> {
        let percdamp = self.percdamp.map(|_| MethodOption::Percdamp);
        let blocksize = self.blocksize.map(|_| MethodOption::Blocksize);
        percdamp.into_iter().chain(blocksize).collect()
    }

    /// The options among `read`.
    #[must_use]
    pub fn only(&self, read: &[MethodOption]) -> Self {
        let reads = |option| read.contains(&option);
        Self {
            percdamp: self.percdamp.filter(|_| reads(MethodOption::Percdamp)),
            blocksize: self.blocksize.filter(|_| reads(MethodOption::Blocksize)),
        }
    }

    /// Checks the values, and that `read` names every option that is set.
    ///
    /// # Errors
    /// Fails with the flag, for `method` in its message.
    pub fn check(&self, method: &str, read: &[MethodOption]) -> Result<(), Failure> {
        if let Some(option) = self
            .given()
            .into_iter()
            .find(|option| !read.contains(option))
        {
            let flag = option.flag();
            return Err(
                Failure::usage(format!("{method} does not read {flag}")).hint(format!(
                    "leave {flag} out, or choose another --prune-method"
                )),
            );
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
