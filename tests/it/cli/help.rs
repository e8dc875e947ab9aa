//! Help texts.

use crate::support::{Place, assert_snapshot};

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
        assert!(!ran.stdout.contains("make-checkpoint"), "hidden: {}", ran.stdout);
        let found: String =
            ran.stdout.lines().map(|line| format!("{}\n", line.trim_end())).collect();
        assert_snapshot(snapshot, &found);
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
        "--force",
    ] {
        let line = help.lines().find(|line| line.trim_start().starts_with(&format!("{flag} ")));
        assert!(
            line.is_some_and(|line| line.split("  ").filter(|part| !part.is_empty()).count() >= 2),
            "{flag}\n{help}"
        );
    }
}
