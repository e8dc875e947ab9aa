//! The environment of a launcher (`mpirun`, `srun`): the number of processes that it has started of this command.

#[cfg(not(feature = "mpi"))]
use anyhow::Result;

use super::Ranks;
#[cfg(feature = "mpi")]
use super::mpi;
use crate::failure::Failure;

/// The variables in which launchers tell the number of processes: of Open MPI, of MPICH and its relatives, and of Slurm for a step.
/// The variables of a Slurm *job* are not among them: a batch script has them, too.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// The processes that a launcher has started of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The variable that tells their number.
    pub variable: &'static str,
    /// Their number, at least two.
    pub processes: usize,
}

impl Launched {
    /// The launched processes of this environment; `None` for a process that was started alone.
    pub fn here() -> Option<Self> {
        Self::by(|variable| std::env::var(variable).ok())
    }

    fn by(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let sizes = SIZES.into_iter().filter_map(|name| {
            let processes = variable(name)?.trim().parse().ok()?;
            Some(Self { variable: name, processes })
        });
        sizes.filter(|launched| launched.processes > 1).max_by_key(|launched| launched.processes)
    }

    /// The refusal of a command whose processes would disturb each other.
    pub fn refusal(&self, command: &str) -> Failure {
        let Self { variable, processes } = self;
        Failure::usage(format!(
            "`{command}` runs in a single process, and {processes} were started"
        ))
        .detail(format!("{variable} is {processes}: every process would write the same files"))
        .hint("start it once, without mpirun or with `srun -n 1`")
    }
}

/// Joins the ranks of the launcher. A process that was started alone stays alone.
///
/// # Arguments
/// * `tell`: prints the last words of a job that has lost a rank
///
/// # Errors
/// Fails where MPI does not see the processes that the launcher has started.
#[cfg(feature = "mpi")]
pub fn join(tell: fn(&str)) -> anyhow::Result<Ranks> {
    let Some(launched) = Launched::here() else {
        return Ok(Ranks::alone());
    };
    let ranks = mpi::start(tell)?;
    if ranks.size() != launched.processes {
        let Launched { variable, processes } = launched;
        return Err(Failure::new(format!(
            "MPI sees {} of the {processes} processes that were started",
            ranks.size()
        ))
        .detail(format!(
            "{variable} is {processes}; the launcher belongs to another MPI than this program"
        ))
        .hint("use the mpirun of the MPI that prune was built with, or `srun --mpi=pmix`")
        .into());
    }
    ranks.with_neighbors()
}

/// Refuses processes that were started together: this build has no MPI.
///
/// # Errors
/// Fails where a launcher has started more than one process.
#[cfg(not(feature = "mpi"))]
pub fn join(_tell: fn(&str)) -> Result<Ranks> {
    let Some(Launched { variable, processes }) = Launched::here() else {
        return Ok(Ranks::alone());
    };
    Err(Failure::usage(format!("{processes} processes were started, and this build of prune has no MPI"))
        .detail(format!("{variable} is {processes}: every process would write the same files"))
        .hint("install it with MPI: cargo install --path . --features mpi; or start it once, with `srun -n 1`")
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_several_processes_of_one_step_count() {
        let by = |pairs: &[(&str, &str)]| {
            let found = |name: &str| pairs.iter().find(|(of, _)| *of == name);
            Launched::by(|name| found(name).map(|(_, value)| value.to_string()))
        };
        assert_eq!(by(&[]), None);
        // A batch script on eight tasks' worth of processors has started nothing yet.
        assert_eq!(by(&[("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "1")]), None);
        assert_eq!(by(&[("OMPI_COMM_WORLD_SIZE", "1")]), None);
        assert_eq!(by(&[("OMPI_COMM_WORLD_SIZE", "many")]), None);
        for variable in SIZES {
            let launched = by(&[(variable, "3")]).unwrap();
            assert_eq!(launched, Launched { variable, processes: 3 });
        }
        let message = by(&[("PMI_SIZE", "4")]).unwrap().refusal("prune merge").to_string();
        assert!(message.starts_with("`prune merge` runs in a single process, and 4 were started"));
    }
}
