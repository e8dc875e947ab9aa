//! The owner of a folder's lock: host, boot, process and batch job, and whether that process still lives.

use std::fs;

use serde::{Deserialize, Serialize};

/// The process that works in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) host: String,
    /// This start of the machine's system; empty where it has no name.
    pub(super) boot: String,
    /// The space of process numbers, of which each container has its own; empty where the system has none.
    pub(super) process_space: String,
    pub(super) pid: u32,
    /// Start of the process in the system's ticks, which tells a reused number apart; empty where unknown.
    pub(super) process_began: String,
    /// The batch job and how often it was started again; empty outside a batch job.
    pub(super) job: String,
    pub(super) restart: String,
    /// Signs given.
    pub(super) beat: u64,
}

impl Owner {
    /// This process.
    pub(super) fn me() -> Self {
        let text = |path: &str| {
            fs::read_to_string(path).map_or(String::new(), |text| text.trim().to_string())
        };
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let pid = std::process::id();
        let array = variable("SLURM_ARRAY_TASK_ID");
        let job = match (variable("SLURM_ARRAY_JOB_ID"), variable("SLURM_JOB_ID")) {
            (of, _) if !of.is_empty() && !array.is_empty() => format!("{of}_{array}"),
            (_, job) => job,
        };
        Self {
            host: host(),
            boot: text("/proc/sys/kernel/random/boot_id"),
            process_space: fs::read_link("/proc/self/ns/pid")
                .map_or(String::new(), |link| link.to_string_lossy().into_owned()),
            pid,
            process_began: began(pid),
            job,
            restart: variable("SLURM_RESTART_COUNT"),
            beat: 0,
        }
    }

    pub(super) fn is_here(&self, me: &Self) -> bool {
        (&self.host, &self.boot, &self.process_space) == (&me.host, &me.boot, &me.process_space)
    }

    /// Returns whether the process lives, if the system can tell at once.
    pub(super) fn lives(&self, me: &Self) -> Option<bool> {
        if self.is_here(me) {
            if !exists(self.pid)? {
                return Some(false);
            }
            if is_dead(self.pid) {
                return Some(false);
            }
            let began = began(self.pid);
            // Systems may hide other users' processes: then only the signs tell. A process that ended since the first question is not
            // hidden.
            let is_hidden = began.is_empty() && !self.process_began.is_empty();
            return match is_hidden {
                true => exists(self.pid).filter(|exists| !exists),
                false => Some(began == self.process_began),
            };
        }
        let is_my_job = !self.job.is_empty() && self.job == me.job;
        (is_my_job && self.restart != me.restart).then_some(false)
    }

    pub(super) fn name(&self) -> String {
        let job = match self.job.as_str() {
            "" => String::new(),
            job => format!(", job {job}"),
        };
        format!("process {} on {}{job}", self.pid, self.host)
    }
}

#[cfg(unix)]
fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// Returns whether a process of any user has this number; `None` where the system cannot be asked.
#[cfg(unix)]
pub(super) fn exists(pid: u32) -> Option<bool> {
    let pid = i32::try_from(pid).ok();
    let pid = pid.and_then(rustix::process::Pid::from_raw);
    Some(pid.is_some_and(|pid| {
        !matches!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH))
    }))
}

/// Returns true for this process, else `None`: outside Unix, only the heartbeat tells.
#[cfg(not(unix))]
pub(super) fn exists(pid: u32) -> Option<bool> {
    (pid == std::process::id()).then_some(true)
}

/// Start of a process in the system's ticks.
pub(super) fn began(pid: u32) -> String {
    stat(pid, 19)
}

/// Returns true for a zombie: a process that has ended and was not waited for. Containers may never wait.
pub(super) fn is_dead(pid: u32) -> bool {
    ["Z", "X"].contains(&stat(pid, 0).as_str())
}

/// A field of `/proc/PID/stat`, counted after the name; empty where the system has no such file.
fn stat(pid: u32, field: usize) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the last parenthesis may hold anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let field = fields.split_whitespace().nth(field);
    field.unwrap_or_default().to_string()
}
