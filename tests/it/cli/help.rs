//! Help texts.

use std::fs;
use std::path::Path;

use crate::support::Place;

#[test]
fn help_is_what_the_snapshots_show() {
    let place = Place::empty();
    for (arguments, snapshot) in [
        ("--help", "help.txt"),
        ("eval --help", "eval-help.txt"),
        ("generate --help", "generate-help.txt"),
        ("inspect --help", "inspect-help.txt"),
        ("demo --help", "demo-help.txt"),
    ] {
        let ran = place.run(arguments);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        assert!(
            !ran.stdout.contains("make-checkpoint"),
            "hidden: {}",
            ran.stdout
        );
        let found: String = ran
            .stdout
            .lines()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect();
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/it/snapshots")
            .join(snapshot);
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap();
        assert!(
            found == expected,
            "help differs from {snapshot}; where that is meant: UPDATE_SNAPSHOTS=1 cargo test help_is\n{found}"
        );
    }
}

#[test]
fn the_short_help_has_one_line_per_flag() {
    let help = Place::empty().run("-h").stdout;
    for flag in [
        "--model",
        "--sparsity-ratio",
        "--prune-method",
        "--dataset",
        "--eval-dataset",
        "--save",
        "--verify",
    ] {
        let line = help
            .lines()
            .find(|line| line.trim_start().starts_with(&format!("{flag} ")));
        assert!(
            line.is_some_and(|line| line.split("  ").filter(|part| !part.is_empty()).count() >= 2),
            "{flag}\n{help}"
        );
    }
}
