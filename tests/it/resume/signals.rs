//! Runs that are killed or signalled at any time, and two runs at once.

use std::fs;

use serde_json::Value;

use super::{
    SLOW, assert_same, finished_layers, outcome, saved_layers, signal, slow, spawned, waiting,
};
use crate::support::{Work, ran};

#[test]
#[cfg(unix)]
fn killed_at_any_time_a_run_goes_on_to_the_same_end() {
    let place = slow();
    let line = SLOW.replace(" --quiet", "");
    let began = std::time::Instant::now();
    assert_eq!(place.run(&line).code, 0);
    let whole = began.elapsed();
    let expected = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    let mut kills = 0;
    for tenth in 1..10 {
        let mut child = spawned(&mut place.command(&line));
        std::thread::sleep(whole * tenth / 10);
        // It may have finished already.
        let _ = child.kill();
        kills += usize::from(child.wait().expect("a child").code().is_none());
        if place.path("out/unfinished.json").exists() || !place.path("out/run.json").exists() {
            let saved = saved_layers(&place, 4);
            let second = place.run(&line);
            assert_eq!(second.code, 0, "{}", second.stderr);
            let when = format!("after {tenth} tenths");
            Work::of(&second.stderr).assert_layers_after(saved, 4, &when);
        }
        let found = outcome(&place.path("out"));
        assert_same(&found, &expected, &format!("after {tenth} tenths"));
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    assert!(kills >= 3, "{kills}");
}

#[test]
#[cfg(unix)]
fn a_signal_stops_a_run_with_exit_code_3_and_the_command_that_goes_on() {
    let place = slow();
    assert_eq!(place.run(SLOW).code, 0);
    let expected = outcome(&place.path("out"));
    for name in ["INT", "TERM", "USR1"] {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let flags = SLOW.replace(" --quiet", "");
        let child = waiting(&place, &flags);
        signal(&child, name);
        let output = child.wait_with_output().expect("a child");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(3), "{name}\n{stderr}");
        assert!(stderr.contains(&format!("interrupted (SIG{name})")), "{stderr}");
        let last = stderr.lines().last().unwrap_or_default().trim();
        assert!(last.ends_with(&flags), "{last}");
        assert!(!place.path("out/prune.lock").exists() && !place.path("out/run.json").exists());
        // The command as it was printed, in a shell.
        let mut again = place.command("");
        let binary = env!("CARGO_BIN_EXE_prune");
        let shell = last.replacen(last.split(' ').next().unwrap_or_default(), binary, 1);
        let environment: Vec<_> =
            again.get_envs().map(|(k, v)| (k.to_owned(), v.map(ToOwned::to_owned))).collect();
        let mut sh = std::process::Command::new("sh");
        sh.args(["-c", &shell]).current_dir(place.path("."));
        for (key, value) in environment {
            match value {
                Some(value) => sh.env(key, value),
                None => sh.env_remove(key),
            };
        }
        let saved = finished_layers(&place);
        let second = ran(&mut sh);
        assert_eq!(second.code, 0, "{}", second.stderr);
        Work::of(&second.stderr).assert_layers_after(saved, 4, name);
        assert!(second.stderr.contains("continuing an unfinished run"), "{}", second.stderr);
        let mut found = outcome(&place.path("out"));
        // `--quiet` is part of the command line only.
        let (mut one, mut other) = (Value::Null, Value::Null);
        for (json, files) in [(&mut one, &mut found), (&mut other, &mut expected.clone())] {
            *json = serde_json::from_slice(&files["run.json"]).expect("JSON");
            json.as_object_mut().expect("an object").remove("arguments");
        }
        assert_eq!(one, other);
        found.insert("run.json".to_string(), expected["run.json"].clone());
        assert_same(&found, &expected, name);
        again.env_clear();
    }
}

#[test]
#[cfg(unix)]
fn a_second_signal_ends_it_at_once_and_nothing_is_lost() {
    let place = slow();
    let line = SLOW.replace(" --quiet", "");
    assert_eq!(place.run(&line).code, 0);
    let expected = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    let child = waiting(&place, &line);
    signal(&child, "TERM");
    signal(&child, "INT");
    let output = child.wait_with_output().expect("a child");
    assert_eq!(output.status.code(), Some(3));
    let saved = saved_layers(&place, 4);
    let second = place.run(&line);
    assert_eq!(second.code, 0, "{}", second.stderr);
    Work::of(&second.stderr).assert_layers_after(saved, 4, "after two signals");
    let found = outcome(&place.path("out"));
    assert_same(&found, &expected, "after two signals");
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let place = slow();
    let mut child = waiting(&place, SLOW);
    let ran = place.run(SLOW);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("error: another prune works in `out`"), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("process {}", child.id())), "{}", ran.stderr);
    assert_eq!(child.wait().expect("a child").code(), Some(0));
    assert!(!place.path("out/prune.lock").exists());
}
