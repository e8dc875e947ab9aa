//! What the machine has: memory that may still be used, under the limits of the machine and of the control group.

use std::path::{Path, PathBuf};

use crate::bytes::ByteSize;

/// Memory that can still be taken: the smaller of the system's available memory and what the control group (v1 or v2)
/// leaves. `None` where the system does not tell.
pub fn available_memory() -> Option<ByteSize> {
    let system = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text));
    let group = std::fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| {
            groups(&text)
                .iter()
                .filter_map(|folder| group_leaves(folder))
                .min()
        });
    match (system, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (system, group) => system.or(group),
    }
}

/// All memory of the machine, whatever limits there are. `None` where the system does not tell.
pub fn total_memory() -> Option<ByteSize> {
    meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

fn meminfo_available(text: &str) -> Option<ByteSize> {
    meminfo(text, "MemAvailable:")
}

fn meminfo(text: &str, field: &str) -> Option<ByteSize> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(ByteSize(kib.saturating_mul(1024)))
}

/// The folders that may hold limits for this process: its own group and every group above it, v2 and v1.
fn groups(cgroup: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            names if names.split(',').any(|name| name == "memory") => {
                Path::new("/sys/fs/cgroup/memory")
            }
            _ => continue,
        };
        let mut folder = root.join(path.trim_start_matches('/'));
        // Inside a container the path may not exist below the mount; the root always does.
        while folder.starts_with(root) {
            folders.push(folder.clone());
            if !folder.pop() {
                break;
            }
        }
    }
    folders
}

/// limit − usage + reclaimable file pages of one group.
fn group_leaves(folder: &Path) -> Option<ByteSize> {
    let number = |name: &str| {
        std::fs::read_to_string(folder.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let usage = number("memory.current")
        .or_else(|| number("memory.usage_in_bytes"))
        .unwrap_or(0);
    let cached = std::fs::read_to_string(folder.join("memory.stat"))
        .ok()
        .and_then(|text| inactive_file(&text))
        .unwrap_or(0);
    Some(ByteSize(limit.saturating_sub(usage.saturating_sub(cached))))
}

fn inactive_file(stat: &str) -> Option<u64> {
    let value = |name: &str| {
        stat.lines().find_map(|line| {
            line.strip_prefix(name)?
                .strip_prefix(' ')?
                .trim()
                .parse()
                .ok()
        })
    };
    value("total_inactive_file").or_else(|| value("inactive_file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        assert_eq!(
            meminfo_available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"),
            Some(ByteSize(2 << 20))
        );
    }

    #[test]
    fn groups_of_both_versions_are_found_up_to_the_root() {
        let v2 = groups("0::/user.slice/job\n");
        assert_eq!(
            v2,
            [
                "/sys/fs/cgroup/user.slice/job",
                "/sys/fs/cgroup/user.slice",
                "/sys/fs/cgroup"
            ]
            .map(PathBuf::from)
        );
        let v1 = groups("4:cpu:/x\n7:hugetlb,memory:/slurm/job_1\n");
        assert_eq!(
            v1.first(),
            Some(&PathBuf::from("/sys/fs/cgroup/memory/slurm/job_1"))
        );
        assert_eq!(v1.last(), Some(&PathBuf::from("/sys/fs/cgroup/memory")));
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_cannot_be_reclaimed() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(group_leaves(folder.path()), None, "no limit");
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        write("memory.stat", "anon 500\ninactive_file 300\n");
        assert_eq!(group_leaves(folder.path()), Some(ByteSize(400)));
    }
}
