//! The memory of the merge pass does not depend on the size of a tensor, and is what the plan says.

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::run::Phase;
use prune::synthetic::RandomCheckpoint;

use crate::support::Place;

/// Three models with this vocabulary.
fn place(vocab_size: usize) -> Place {
    let place = Place::empty();
    for (name, seed) in [("m", 0), ("e1", 1), ("e2", 2)] {
        place.checkpoint(
            name,
            &RandomCheckpoint {
                vocab_size,
                num_hidden_layers: 1,
                dtype: StoredDtype::Bf16,
                seed,
                ..RandomCheckpoint::default()
            },
        );
    }
    place
}

/// The peak of a merge pass with a threshold over the whole model.
fn peak(place: &Place, flags: &str) -> ByteSize {
    super::merge(
        place,
        &format!(
            "--base m --model e1 --model e2 --method ties --density 0.5 --trim-scope model --threads 2 --force --save out {flags}"
        ),
    );
    let manifest = place.manifest("out");
    let plan = manifest.plan.expect("planned");
    let planned = plan.phases.iter().find(|phase| phase.phase == Phase::Merge);
    let planned = planned.expect("planned").bytes;
    let measured = manifest.phases.iter().find(|phase| phase.phase == Phase::Merge);
    let measured = measured.and_then(|phase| phase.peak_anonymous).expect("measured");
    assert!(measured <= planned, "{measured} measured, {planned} planned");
    measured
}

#[test]
#[cfg(target_os = "linux")]
fn a_large_embedding_needs_no_more_memory_than_a_small_one() {
    let small = peak(&place(2_000), "");
    // Embedding and head of 38 MiB each.
    let large = place(300_000);
    let of_large = peak(&large, "");
    assert!(
        of_large.0 < small.0 + (4 << 20) && of_large.0 < 40 << 20,
        "{small} with 2,000 tokens, {of_large} with 300,000"
    );
    let limited = peak(&large, "--max-memory cpu=24MiB");
    assert!(limited.0 <= 24 << 20, "{limited} of 24 MiB");
}

#[test]
fn a_merge_that_cannot_fit_is_refused_with_the_limit_that_is_enough() {
    let place = place(2_000);
    let line = "merge --base m --model e1 --method ties --density 0.5 --save out --max-memory";
    let ran = place.run(&format!("{line} cpu=1MiB"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let hint = ran.stderr.lines().find_map(|line| line.strip_prefix("hint: use --max-memory "));
    let enough = hint.unwrap_or_else(|| panic!("{}", ran.stderr));
    assert!(!place.path("out").exists(), "nothing is written");
    let ran = place.run(&format!("{line} {enough}"));
    assert_eq!(ran.code, 0, "{enough}\n{}", ran.stderr);
}

/// Every phase is planned, near to what it takes, and within the limit: also the read-back, at the least limit that works.
#[test]
#[cfg(target_os = "linux")]
fn no_phase_of_a_merge_takes_more_than_its_limit() {
    let place = place(120_000);
    let line =
        "merge --base m --model e1 --model e2 --method ties --density 0.5 --force --save out";
    let ran = place.run(&format!("{line} --max-memory cpu=2MiB"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let hint = ran.stderr.lines().find_map(|line| line.strip_prefix("hint: use "));
    let least = hint.unwrap_or_else(|| panic!("{}", ran.stderr)).to_string();
    assert!(ran.stderr.contains("does not fit into"), "{}", ran.stderr);
    for limit in [&least[..], "--max-memory cpu=1GiB"] {
        for more in ["--threads 1", "--threads 2", "--threads 2 --keep-zeros"] {
            let ran = place.run(&format!("{line} {limit} {more}"));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            let manifest = place.manifest("out");
            let plan = manifest.plan.expect("planned");
            let (device, peak) = (&plan.devices[0], manifest.peak_anonymous.expect("measured"));
            let budget = device.budget.expect("given");
            assert!(peak <= budget, "{limit} {more}: {peak} of {budget}");
            assert!(device.peak <= budget, "{limit} {more}: {} planned", device.peak);
            let difference = device.peak.mib() - peak.mib();
            // Tables of counts are planned in full: 8 MiB here, of which a model of this size touches a part.
            assert!(
                (-1.0..10.0).contains(&difference),
                "{limit} {more}: {} planned, {peak} measured",
                device.peak
            );
        }
    }
}
