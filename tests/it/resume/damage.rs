//! Files of an unfinished run that were damaged: a flipped bit and appended bytes never lead to another result. The damaged part is done
//! again, or one error names the file and a remedy that works.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;

use super::{MAGNITUDE, WANDA, command, of_layers, outcome};
use crate::recover::{COMMON, pruned};
use crate::support::Place;

/// A damage of a file.
type Damage = fn(&mut Vec<u8>);

/// Damages, each with its name.
const DAMAGES: [(&str, Damage); 3] = [
    ("a flipped bit", |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
    }),
    ("appended bytes", |bytes| bytes.extend(b"more")),
    ("missing bytes", |bytes| bytes.truncate(bytes.len() - 3)),
];

/// The files of the result that do not tell times or warnings.
fn results(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let mut files = outcome(&place.path("out"));
    files.remove("run.json");
    files
}

/// Copies a folder.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).expect("a copy")),
        }
    }
}

/// The files below a folder that hold work: no locks, and no log.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if !path.ends_with("prune.lock") && !path.ends_with("memory_log.csv") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Leaves a run that was killed at an operation, and damages each of its files in each way. Returns the names of the files that were
/// refused.
fn damaged_everywhere(place: &Place, line: &str, at: u64) -> Vec<String> {
    assert_eq!(place.run(line).code, 0);
    let expected = results(place);
    let (out, kept) = (place.path("out"), place.path("kept"));
    fs::remove_dir_all(&out).expect("removed");
    assert!(place.with_fault(line, &format!("kill:{at}")).is_none());
    let _ = fs::remove_dir_all(&kept);
    copy(&out, &kept);
    let mut refused = Vec::new();
    let names: Vec<PathBuf> = files(&out)
        .iter()
        .map(|path| path.strip_prefix(&out).expect("below").to_path_buf())
        .collect();
    assert!(names.len() > 1, "{names:?}");
    for name in names {
        for (what, damage) in DAMAGES {
            let when = format!("{what} of `{}` of `{line}`", name.display());
            fs::remove_dir_all(&out).expect("removed");
            copy(&kept, &out);
            let mut bytes = fs::read(out.join(&name)).expect("a file");
            if bytes.is_empty() {
                continue;
            }
            damage(&mut bytes);
            fs::write(out.join(&name), bytes).expect("written");
            let ran = place.run(line);
            assert!(!ran.stderr.contains("panicked"), "{when}: {}", ran.stderr);
            if ran.code != 0 {
                assert_eq!(ran.code, 1, "{when}: {}", ran.stderr);
                let named = name.file_name().expect("a name").to_string_lossy();
                // The matrices of a narrower model are refused with their folder.
                let is_named = ran.stderr.contains(&*named) || name.starts_with("narrower");
                assert!(is_named, "{when}: {}", ran.stderr);
                assert!(ran.stderr.contains("\nhint: "), "{when}: {}", ran.stderr);
                refused.push(named.into_owned());
                // The remedy.
                let again = match name.ends_with("training.state") {
                    true => {
                        fs::remove_file(out.join(&name)).expect("removed");
                        place.run(line)
                    }
                    false => place.run(&format!("{line} --force")),
                };
                assert_eq!(again.code, 0, "{when}: {}", again.stderr);
            }
            assert!(results(place) == expected, "{when}: {}", ran.stderr);
        }
    }
    refused.dedup();
    refused
}

#[test]
fn damaged_files_of_a_pruning_change_no_bit() {
    let place = of_layers(3);
    for (flags, at) in [(WANDA, 85), (MAGNITUDE, 60)] {
        let refused = damaged_everywhere(&place, &command(flags), at);
        assert_eq!(refused, ["unfinished.json"], "{flags}");
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

#[test]
fn damaged_files_of_a_narrower_model_change_no_bit() {
    let place = of_layers(2);
    let flags = "--model m --sparsity-ratio 0.5 --drop-width 0.3 --eval none --save out";
    let refused = damaged_everywhere(&place, &command(flags), 100);
    assert!(refused.contains(&"unfinished.json".to_string()), "{refused:?}");
}

#[test]
fn damaged_files_of_a_training_change_no_bit() {
    let place = pruned(StoredDtype::Bf16, "--sparsity-ratio 0.5");
    for (way, at, expected) in [
        (
            "--how full --lr 3e-3 --save-every 2 --held-out 2",
            40,
            &["training.state", "unfinished.json"][..],
        ),
        (
            "--how blocks --lr 3e-3 --teacher m --nsamples 16 --train-norms --eval none",
            52,
            &["unfinished.json"][..],
        ),
    ] {
        let line = format!("{COMMON} {way} --save out");
        let refused = damaged_everywhere(&place, &line, at);
        assert_eq!(refused, expected, "{way}");
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

#[test]
fn damaged_files_of_a_merge_with_statistics_change_no_bit() {
    let place = Place::empty();
    for (name, seed) in [("m", 0), ("e", 1)] {
        let shape =
            RandomCheckpoint { seed, dtype: StoredDtype::Bf16, ..RandomCheckpoint::default() };
        place.checkpoint(name, &shape);
    }
    let line = "merge --base m --model e --method ties --density 0.5 --saliency base --dataset train.txt \
        --nsamples 3 --seqlen 100 --save out";
    let refused = damaged_everywhere(&place, line, 30);
    assert!(!refused.is_empty());
}

#[test]
fn a_state_of_an_older_version_is_refused_with_a_way_out() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let line = format!("{COMMON} --how full --lr 3e-3 --save-every 1 --save out");
    assert!(place.with_fault(&line, "kill:40").is_none());
    let path = place.path("out/training.state");
    let bytes = fs::read(&path).expect("a saved training");
    let end = bytes.iter().position(|byte| *byte == b'\n').expect("a seal");
    // Older versions began with the settings.
    fs::write(&path, &bytes[end + 1..]).expect("written");
    let ran = place.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("or an older version wrote it"), "{}", ran.stderr);
}
