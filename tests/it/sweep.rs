//! `prune sweep` on a tiny model: cells equal single runs, sweeps continue, shards share a folder, failures are recorded.

mod impossible;
mod measured;
mod together;

use std::collections::BTreeMap;
use std::fs;

use prune::run::Manifest;
use serde_json::Value;

use crate::support::{
    Place, Ran, TEXTS, assert_cells_after, assert_snapshot, refuses_command, saved_cells,
};

/// Two methods, a ratio and a pattern, two seeds: six cells, because magnitude has one seed.
const GRID: &str = "sweep --model m --methods wanda,magnitude --ratios 0.5 --types unstructured,2:4 --seeds 0,1 --save out";

const CELLS: [&str; 6] = [
    "wanda-0.5-seed0",
    "wanda-0.5-seed1",
    "wanda-2of4-seed0",
    "wanda-2of4-seed1",
    "magnitude-0.5-seed0",
    "magnitude-2of4-seed0",
];

/// The mask hashes of a run, in order.
fn masks(manifest: &Manifest) -> Vec<Option<String>> {
    let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
    matrices.map(|matrix| matrix.mask_sha256.clone()).collect()
}

/// `sweep.json` without times, memory and the version.
fn table(place: &Place) -> Value {
    let text = fs::read(place.path("out/sweep.json")).expect("a sweep writes its table");
    let mut json: Value = serde_json::from_slice(&text).expect("it is JSON");
    for cell in json["cells"].as_array_mut().expect("a list") {
        let cell = cell.as_object_mut().expect("an object");
        cell.remove("seconds");
        cell.remove("peak_anonymous");
    }
    json
}

/// The moments at which the cells began.
fn begun(place: &Place) -> BTreeMap<&'static str, Vec<u8>> {
    let run = |cell: &'static str| fs::read(place.path("out").join(cell).join("run.json"));
    let found = CELLS.iter().filter_map(|cell| Some((*cell, run(cell).ok()?)));
    found.collect()
}

/// The lock that a run leaves when it is killed.
fn lock_of_a_killed_run() -> Vec<u8> {
    let place = Place::new();
    let line = format!("--model m --sparsity-ratio 0.5 --eval none --save out {TEXTS}");
    assert!(place.with_fault(&line, "kill:30").is_none());
    fs::read(place.path("out/prune.lock")).expect("a killed run leaves its lock")
}

fn sweep(place: &Place, more: &str) -> Ran {
    place.run(&format!("{GRID} {TEXTS} {more}"))
}

#[test]
fn cells_of_smaller_models_show_the_dense_perplexity_of_the_source() {
    for flags in ["--drop-width 0.3", "--drop-layers 1"] {
        let place = Place::new();
        let ran = place.run(&format!(
            "sweep --model m --methods wanda,magnitude --ratios 0.5 --save out {TEXTS} {flags}"
        ));
        assert_eq!(ran.code, 0, "{flags}: {}", ran.stderr);
        let dense = |folder: &str| {
            let perplexity = place.manifest(folder).perplexity.dense;
            perplexity.map(|report| report.perplexity)
        };
        let source = dense("out/dense");
        assert!(source.is_some());
        for cell in ["wanda-0.5-seed0", "magnitude-0.5-seed0"] {
            let cell = format!("out/{cell}");
            assert_eq!(dense(&cell), source, "{flags} {cell}");
            let manifest = place.manifest(&cell);
            assert!(
                manifest.width_drop.is_some() || manifest.layer_drop.is_some(),
                "{flags} {cell}"
            );
        }
    }
}

#[test]
fn cells_equal_single_runs_and_the_table_has_their_means() {
    let place = Place::new();
    let ran = sweep(&place, "--save-masks");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("cell 6 of 6: magnitude-2of4-seed0"), "{}", ran.stderr);
    for cell in CELLS {
        let mut flags = cell.split('-');
        let method = flags.next().expect("a method");
        let target = match flags.next() {
            Some("2of4") => "--sparsity-type 2:4",
            _ => "--sparsity-ratio 0.5",
        };
        let seed = &cell[cell.len() - 1..];
        place.prune(&format!(
            "--model m --prune-method {method} {target} --seed {seed} --eval both --no-save-model --save-masks --save single/{cell}"
        ));
        let (single, of_sweep) =
            (place.manifest(&format!("single/{cell}")), place.manifest(&format!("out/{cell}")));
        assert_eq!(masks(&single), masks(&of_sweep), "{cell}");
        assert_eq!(single.perplexity, of_sweep.perplexity, "{cell}");
        let bytes =
            |folder: &str| fs::read(place.path(folder).join(cell).join("masks.safetensors"));
        assert_eq!(bytes("single").expect("saved"), bytes("out").expect("saved"), "{cell}");
        assert!(!place.path("out").join(cell).join("model").exists());
    }
    let pruned = |cell: &str| {
        let manifest = place.manifest(&format!("out/{cell}"));
        manifest.perplexity.pruned.expect("measured").perplexity
    };
    let (one, other) = (pruned("wanda-0.5-seed0"), pruned("wanda-0.5-seed1"));
    assert!(one != other, "seeds draw other samples");
    let mean = (one + other) / 2.0;
    // Of two values the sample deviation is their distance over √2.
    let deviation = (one - other).abs() / 2f64.sqrt();
    let expected = format!("{mean:.4} ± {deviation:.4}");
    assert!(ran.stdout.contains(&expected), "{expected}\n{}", ran.stdout);
    for file in ["out/sweep.md", "out/report.html"] {
        let text = fs::read_to_string(place.path(file)).expect("written");
        assert!(text.contains(&expected), "{file}");
    }
    let json = table(&place);
    assert_eq!(json["columns"], serde_json::json!(["0.5", "2:4"]));
    assert_eq!(json["methods"], serde_json::json!(["wanda", "magnitude"]));
    let dense = place.manifest("out/dense").perplexity.dense.expect("measured");
    assert_eq!(json["dense_perplexity"], serde_json::json!(dense.perplexity));
    // No cell has measured the dense model itself.
    let phases = &place.manifest("out/wanda-0.5-seed0").phases;
    assert!(phases.iter().all(|phase| phase.phase.to_string() != "evaluate dense"));
}

#[test]
fn shards_make_the_table_of_one_process_whatever_their_order() {
    let place = Place::new();
    assert_eq!(sweep(&place, "").code, 0);
    let expected = table(&place);
    fs::remove_dir_all(place.path("out")).expect("removed");
    let second = sweep(&place, "--shard 2/2");
    assert_eq!(second.code, 0, "{}", second.stderr);
    assert!(
        second.stderr.contains("3 cells of other processes are not finished"),
        "{}",
        second.stderr
    );
    let half = begun(&place);
    assert_eq!(half.len(), 3);
    let first = sweep(&place, "--shard 1/2");
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert_eq!(table(&place), expected);
    let both = begun(&place);
    assert!(half.iter().all(|(cell, record)| both[cell] == *record));
    // Two at once, into one folder.
    fs::remove_dir_all(place.path("out")).expect("removed");
    let line = format!("{GRID} {TEXTS} --quiet");
    let mut child = place
        .command(&format!("{line} --shard 1/2"))
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the binary");
    let second = sweep(&place, "--shard 2/2");
    assert_eq!(second.code, 0, "{}", second.stderr);
    assert_eq!(child.wait().expect("a child").code(), Some(0));
    assert_eq!(table(&place), expected);
    // The table again, from the cells.
    for file in ["sweep.md", "report.html"] {
        fs::remove_file(place.path("out").join(file)).expect("removed");
    }
    let again = place.run("sweep --table out");
    assert_eq!((again.code, table(&place)["cells"].clone()), (0, expected["cells"].clone()));
    assert!(place.path("out/report.html").is_file() && place.path("out/sweep.md").is_file());
}

#[test]
#[cfg(unix)]
fn killed_at_any_time_a_sweep_goes_on_and_leaves_finished_cells_alone() {
    let place = Place::new();
    let began = std::time::Instant::now();
    assert_eq!(sweep(&place, "--keep-models").code, 0);
    let whole = began.elapsed();
    let expected = table(&place);
    let mut kills = 0;
    for tenth in [2, 4, 6, 8] {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let mut command = place.command(&format!("{GRID} {TEXTS} --keep-models --quiet"));
        let mut child = command.stdout(std::process::Stdio::null()).spawn().expect("the binary");
        std::thread::sleep(whole * tenth / 10);
        // It may have finished already.
        let _ = child.kill();
        kills += usize::from(child.wait().expect("a child").code().is_none());
        let before = begun(&place);
        let saved = saved_cells(&place.path("out"));
        let second = sweep(&place, "--keep-models");
        assert_eq!(second.code, 0, "{}", second.stderr);
        assert_cells_after(&saved, &format!("after {tenth} tenths"));
        assert_eq!(table(&place), expected, "after {tenth} tenths");
        let after = begun(&place);
        let unfinished =
            |cell: &str| second.stderr.contains(&format!("{cell}\nthis run is finished"));
        let is_kept =
            |(cell, record): (&&str, &Vec<u8>)| after[cell] == *record || unfinished(cell);
        assert!(before.iter().all(is_kept));
        assert!(place.path("out/wanda-0.5-seed0/model/config.json").is_file());
        assert!(!place.path("out/wanda-0.5-seed0/unfinished.json").exists());
    }
    assert!(kills > 0);
}

#[test]
#[cfg(unix)]
fn an_interrupted_sweep_ends_with_exit_code_3_and_the_command_that_continues_it() {
    let place = Place::new();
    let seeds: Vec<String> = (0..100).map(|seed| seed.to_string()).collect();
    let line = GRID.replace("--seeds 0,1", &format!("--seeds {}", seeds.join(",")));
    let child = place
        .command(&format!("{line} {TEXTS}"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary");
    let until = std::time::Instant::now();
    while !place.path("out/wanda-0.5-seed0/cell.json").exists() {
        assert!(until.elapsed().as_secs() < 60, "no cell has begun");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    crate::resume::signal(&child, "TERM");
    let output = child.wait_with_output().expect("a child");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(
        stderr.contains("finished cells are kept in `out`; this command continues the sweep:"),
        "{stderr}"
    );
}

#[test]
fn what_a_killed_process_left_in_finished_cells_is_removed() {
    let place = Place::new();
    assert_eq!(sweep(&place, "--eval both --keep-models").code, 0);
    let names = |cell: &str| {
        let mut names = place.names(&format!("out/{cell}"));
        names.extend(place.names(&format!("out/{cell}/model")));
        names
    };
    let expected = CELLS.map(names);
    let dense = place.names("out/dense");
    // A lock as a killed process leaves it, and a file that it was writing.
    let lock = lock_of_a_killed_run();
    for cell in CELLS {
        for folder in [cell.to_string(), format!("{cell}/model"), "dense".to_string()] {
            let folder = place.path("out").join(folder);
            fs::write(folder.join(".run.json.4321.tmp"), b"{").expect("written");
            fs::write(folder.join("prune.lock"), &lock).expect("written");
        }
    }
    let before = begun(&place);
    assert_eq!(sweep(&place, "--eval both --keep-models").code, 0);
    assert_eq!(begun(&place), before, "finished cells are left alone");
    assert_eq!(CELLS.map(names), expected);
    assert_eq!(place.names("out/dense"), dense);
}

#[test]
fn a_cell_that_fails_is_recorded_and_the_others_go_on() {
    let place = Place::new();
    let line = format!("{GRID} {TEXTS}").replace("--dataset train.txt", "--dataset absent.txt");
    // The lock of a process that is gone is no sign of work: the cell has failed all the same.
    fs::create_dir_all(place.path("out/wanda-0.5-seed0")).expect("a new folder");
    fs::write(place.path("out/wanda-0.5-seed0/prune.lock"), lock_of_a_killed_run())
        .expect("written");
    let ran = place.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("error: 4 of 6 cells failed\n  wanda-0.5-seed0\n"),
        "{}",
        ran.stderr
    );
    assert!(ran.stdout.contains("failed"), "{}", ran.stdout);
    assert_eq!(begun(&place).len(), 2, "magnitude needs no calibration text");
    let json = table(&place);
    assert_eq!(json["cells"][0]["state"], "failed");
    let error = json["cells"][0]["error"].as_str().expect("recorded");
    assert!(error.contains("absent.txt"), "{error}");
    // Once the text is there, the same command runs these cells.
    fs::copy(place.path("train.txt"), place.path("absent.txt")).expect("copied");
    let before = begun(&place);
    let again = place.run(&line);
    assert_eq!(again.code, 0, "{}", again.stderr);
    let after = begun(&place);
    assert_eq!(after.len(), 6);
    assert!(before.iter().all(|(cell, record)| after[cell] == *record));
    assert!(table(&place)["cells"][0].get("error").is_none());
}

#[test]
fn equal_sweeps_in_one_folder_share_the_cells() {
    let place = Place::new();
    assert_eq!(sweep(&place, "").code, 0);
    let expected = table(&place);
    for _ in 0..3 {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let line = format!("{GRID} {TEXTS} --quiet");
        let mut child =
            place.command(&line).stdout(std::process::Stdio::null()).spawn().expect("the binary");
        let second = sweep(&place, "");
        let first = child.wait().expect("a child").code();
        assert_eq!((first, second.code), (Some(0), 0), "{}", second.stderr);
        assert_eq!(table(&place), expected);
    }
}

#[test]
fn cells_of_other_settings_are_refused_and_a_grid_can_grow() {
    let place = Place::new();
    let small = "sweep --model m --methods magnitude --ratios 0.5 --save out";
    let ran = place.run(&format!("{small} {TEXTS}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let texts = TEXTS.replace("--eval-windows 5", "--eval-windows 4");
    let refused = refuses_command(
        &place,
        &format!("{small} {texts}"),
        1,
        "error: `out` holds cells of a sweep with other settings",
        "hint: give the settings of that sweep, choose another --save folder, or replace its cells with --force",
    );
    assert!(refused.stderr.contains("  eval-windows: 5 there, 4 now"), "{}", refused.stderr);
    fs::create_dir_all(place.path("out/magnitude-0.6-seed0/model")).expect("a new folder");
    let larger = small.replace("--ratios 0.5", "--ratios 0.6,0.5");
    refuses_command(
        &place,
        &format!("{larger} {TEXTS}"),
        1,
        "error: `out/magnitude-0.6-seed0` holds files that are not of a sweep",
        "hint: choose another --save folder, or replace these files with --force",
    );
    fs::remove_dir_all(place.path("out/magnitude-0.6-seed0")).expect("removed");
    let ran = place.run(&format!("{larger} {TEXTS}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(table(&place)["columns"], serde_json::json!(["0.5", "0.6"]));
    let forced = place.run(&format!("{larger} {texts} --force"));
    assert_eq!(forced.code, 0, "{}", forced.stderr);
    let windows = place.manifest("out/magnitude-0.5-seed0").perplexity.pruned;
    assert_eq!(windows.expect("measured").windows, 4);
}

#[test]
fn a_gate_holds_for_every_cell_also_for_those_that_are_finished() {
    let place = Place::new();
    let line = format!("sweep --model m --methods magnitude --ratios 0.5 --save out {TEXTS}");
    assert_eq!(place.run(&line).code, 0);
    let ran = place.run(&format!("{line} --max-perplexity 1.5"));
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    let expected = "gate missed: --max-perplexity 1.5 is not met by magnitude-0.5-seed0";
    assert!(ran.stderr.contains(expected), "{}", ran.stderr);
}

#[test]
fn a_dry_run_lists_the_cells_and_writes_nothing() {
    let place = Place::new();
    let ran = sweep(&place, "--dry-run");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let expected: String = CELLS.iter().map(|cell| format!("to do       {cell}\n")).collect();
    assert_eq!(ran.stdout, expected);
    assert!(!place.path("out").exists());
    let half = sweep(&place, "--dry-run --shard 2/2").stdout;
    assert_eq!(half.lines().count(), 3);
    assert!(half.contains(CELLS[1]) && !half.contains(CELLS[0]));
}

#[test]
fn lists_that_make_no_grid_are_refused_with_a_fix() {
    let place = Place::new();
    let refused = |flags: &str, message: &str, hint: &str| {
        let line = format!("sweep --model m --save out {TEXTS} {flags}");
        refuses_command(&place, &line, 2, &format!("error: {message}"), hint);
    };
    for (flags, message, hint) in [
        (
            "--methods wanda --ratios ''",
            "--ratios is empty",
            "hint: write values separated by commas, like --ratios 0.4,0.5,0.6",
        ),
        (
            "--methods wanda --ratios 0.4,,0.5",
            "value 2 of 3 of --ratios 0.4,,0.5 is empty",
            "hint: write values separated by commas, like --ratios 0.4,0.5,0.6",
        ),
        (
            "--methods wanda --ratios 0.4,0.5,0.40",
            "--ratios 0.4,0.5,0.40 has 0.4 twice, as values 1 and 3",
            "hint: use --ratios 0.4,0.5",
        ),
        (
            "--methods wanda,ria,wanda --ratios 0.5",
            "--methods wanda,ria,wanda has wanda twice, as values 1 and 3",
            "hint: use --methods wanda,ria",
        ),
        (
            "--methods wanda --ratios 0.5,60",
            "--ratios has `60`; a ratio is the fraction removed, above 0 and below 1",
            "hint: for 60 percent write 0.6",
        ),
        (
            "--methods wanda --ratios 0",
            "--ratios has `0`; a ratio is the fraction removed, above 0 and below 1",
            "hint: write fractions separated by commas, like --ratios 0.4,0.5,0.6",
        ),
        (
            "--methods wanda --ratios 0.5 --types 2:4",
            "--ratios 0.5 has no use: --types 2:4 names N:M patterns only, and each has its own ratio",
            "hint: leave --ratios out, or add `unstructured`: --types unstructured,2:4",
        ),
        (
            "--methods wanda",
            "--ratios is missing",
            "hint: name the fractions to remove, like --ratios 0.4,0.5,0.6, or patterns alone, like --types 2:4",
        ),
        (
            "--methods wanda --ratios 0.5 --seeds 0,x",
            "--seeds has `x`, which is not a whole number from 0 on",
            "hint: write numbers separated by commas, like --seeds 0,1,2",
        ),
        (
            "--methods wanda --ratios 0.5 --shard 3/2",
            "--shard 3/2: there is no shard 3 of 2",
            "hint: write i/n with i from 1 to n, like --shard 2/4 for the second of four processes",
        ),
    ] {
        refused(flags, message, hint);
    }
    for (flags, hint) in [
        ("--seeds 0,1 --seed 0", "use --seeds, like --seeds 0,1,2"),
        ("--seed 3", "use --seeds, like --seeds 0,1,2"),
        ("--sparsity-type unstructured", "use --types, like --types unstructured,2:4"),
        ("--sparsity-ratio 0.5", "use --ratios, like --ratios 0.4,0.5"),
        ("--use-variant", "name the method: --methods wanda-variant"),
        ("--save-model x", "use --keep-models"),
        ("--resume", "leave it out: the same command continues a sweep"),
    ] {
        let ran =
            place.run(&format!("sweep --model m --save out --methods wanda --ratios 0.5 {flags}"));
        assert_eq!(ran.code, 2, "{flags}");
        let of_one_run = format!("a sweep has many runs: {hint}");
        assert!(ran.stderr.contains(&of_one_run), "{flags}: {}", ran.stderr);
    }
    let misspelt = place.run("sweep --model m --save out --methods wnada --ratios 0.5");
    assert_eq!(misspelt.code, 2);
    assert!(misspelt.stderr.contains("'wanda'"), "{}", misspelt.stderr);
    let absent = place.run("sweep --model m --save out --methods admm --ratios 0.5");
    assert!(absent.stderr.contains("does not exist in this version"), "{}", absent.stderr);
    let no_folder = place.run("sweep --model m --methods wanda --ratios 0.5");
    assert_eq!(no_folder.code, 2);
    assert!(no_folder.stderr.contains("hint: add --save DIR"), "{}", no_folder.stderr);
    let no_sweep = place.run("sweep --table m");
    assert_eq!(no_sweep.code, 2);
    assert!(no_sweep.stderr.contains("`m` holds no cell of a sweep"), "{}", no_sweep.stderr);
}

#[test]
fn the_help_is_what_the_snapshot_shows() {
    let ran = Place::empty().run("sweep --help");
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let lines = ran.stdout.lines();
    let found: String = lines.map(|line| format!("{}\n", line.trim_end())).collect();
    assert_snapshot("sweep-help.txt", &found);
}
