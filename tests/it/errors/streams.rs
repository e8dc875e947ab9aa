//! Ends of a run whose reader, disk or terminal fails.

use std::fs;

use crate::support::{Place, arguments};

#[test]
fn a_reader_who_left_is_no_panic() {
    let place = Place::new();
    let mut child = place
        .command("eval --model m --eval-dataset test.txt --seqlen 64 --eval-windows 2")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(!messages.contains("panicked"), "{messages}");
}

/// A lost result is no success, unless the reader left.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_standard_output_is_an_error() {
    let place = Place::new();
    for command in ["inspect m", "plan --model m --json"] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full");
        let output = place.command(command).stdout(full.unwrap()).output().unwrap();
        let messages = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{messages}");
        assert!(
            messages.contains("error: cannot write the result to standard output\n  No space left"),
            "{messages}"
        );
    }
}

/// Waits until a process catches SIGTERM, where the system tells: one that is told before ends otherwise.
#[cfg(unix)]
fn listens(pid: u32) {
    const SIGTERM: u64 = 1 << 14;
    for _ in 0..600 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        match caught.map(|caught| u64::from_str_radix(caught.trim(), 16)) {
            Some(Ok(caught)) if caught & SIGTERM == 0 => {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            _ => return,
        }
    }
}

/// Whoever reads the messages may have stopped reading, and their pipe is full: a signal ends the process all the same.
#[test]
#[cfg(unix)]
fn a_signal_works_while_the_messages_are_not_read() {
    use std::io::Write;
    let place = Place::new();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let filled = writer.try_clone().unwrap();
    let filling = std::thread::spawn(move || {
        // More than a pipe holds; ends with an error when the last reader is gone.
        while writer.write_all(&[b'x'; 4096]).is_ok() {}
    });
    std::thread::sleep(std::time::Duration::from_millis(300));
    let mut child = place.command(&arguments("--verbose")).stderr(filled).spawn().unwrap();
    // It stands at its first message.
    listens(child.id());
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "nothing stops it");
    let sent = std::process::Command::new("kill").arg(child.id().to_string()).status();
    assert!(sent.unwrap().success());
    let ended = (0..600).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        child.try_wait().unwrap()
    });
    if ended.is_none() {
        child.kill().unwrap();
    }
    drop(reader);
    filling.join().unwrap();
    assert_eq!(ended.and_then(|status| status.code()), Some(3));
}

/// The terminal of a batch job closes while it works: what it does is not what it says.
#[test]
fn a_run_outlives_the_reader_of_its_messages() {
    let place = Place::new();
    let mut child = place
        .command(&arguments(""))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(place.manifest("out").sparsity.is_some());
}
