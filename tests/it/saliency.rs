//! Activation statistics of merges: the goldens with their statistics and with ours, a device without memory, interrupted
//! measurements, and files of other statistics.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prune::linalg::StoredDtype;
use prune::run::merging::MergeReport;
use prune::synthetic::RandomCheckpoint;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sha2::Digest as _;

use crate::support::{Place, Ran, shared};

type Tensors = BTreeMap<String, Vec<f64>>;

/// Every tensor of a file of f32 or f64.
fn tensors(file: &Path) -> Tensors {
    let bytes = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let elements = |dtype, data: &[u8]| -> Vec<f64> {
        match dtype {
            Dtype::F64 => {
                let chunks = data.as_chunks::<8>().0.iter();
                chunks.map(|bytes| f64::from_le_bytes(*bytes)).collect()
            }
            Dtype::F32 => {
                let chunks = data.as_chunks::<4>().0.iter();
                chunks.map(|bytes| f32::from_le_bytes(*bytes).into()).collect()
            }
            other => panic!("{other:?}"),
        }
    };
    let all = file.tensors().into_iter();
    all.map(|(name, view)| (name, elements(view.dtype(), view.data()))).collect()
}

/// Replaces vectors of a file of statistics by those of a golden.
fn replace(file: &Path, model: usize, golden: &Tensors) {
    let mut bytes = fs::read(file).expect("a file");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: BTreeMap<String, Value> =
        serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    for (name, values) in golden {
        let entry = &header[&format!("{model}.{name}")]["data_offsets"];
        let start = 8 + length + entry[0].as_u64().expect("a number") as usize;
        for (at, value) in values.iter().enumerate() {
            let place = start + 4 * at;
            bytes[place..place + 4].copy_from_slice(&(*value as f32).to_le_bytes());
        }
    }
    let sum = prune::bytes::hex(&sha2::Sha256::digest(&bytes[8 + length..]));
    let text = std::str::from_utf8(&bytes[8..8 + length]).expect("a header");
    let (_, old) = text.split_once("\"data_sha256\":\"").expect("a hash");
    let place = 8 + text.len() - old.len();
    bytes[place..place + 64].copy_from_slice(sum.as_bytes());
    fs::write(file, bytes).expect("it can be replaced");
}

fn merged(place: &Place, line: &str) -> Ran {
    let ran = place.run(&format!("merge {line}"));
    assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
    ran
}

fn report(place: &Place, run: &str) -> MergeReport {
    place.manifest(run).merge.expect("a merge")
}

fn model(place: &Place, run: &str) -> Tensors {
    tensors(&place.path(run).join("model/model.safetensors"))
}

/// The statistics of the goldens by their index in the file that [`measure`] makes.
const STATISTICS: [&str; 3] = [
    "stories260k-on-wiki.train.head1m.raw",
    "expert-wiki-on-wiki.train.head1m.raw",
    "expert-stories-on-stories.train.txt",
];

/// The models, texts and flags of the goldens.
struct Goldens {
    place: Place,
    folder: std::path::PathBuf,
    base: String,
    experts: String,
    wiki: String,
    stories: String,
}

impl Goldens {
    fn new() -> Option<Self> {
        let shared = shared()?;
        let models = shared.join("models");
        let expert = |name: &str| models.join("stories260k-experts").join(name);
        let text = |path: &str| format!("--dataset wikitext2:{}", shared.join(path).display());
        Some(Self {
            place: Place::empty(),
            folder: shared.join("goldens/merge"),
            base: format!("--base {}", models.join("stories260k").display()),
            experts: format!(
                "--model {} --model {}",
                expert("expert-wiki").display(),
                expert("expert-stories").display()
            ),
            wiki: text("data/wikitext2/wiki.train.head1m.raw"),
            stories: text("data/stories/stories.train.txt"),
        })
    }

    /// Merges with the statistics in `s.safetensors`, which are measured where they are missing.
    fn merge(&self, run: &str, flags: &str) -> Ran {
        let (base, experts) = (&self.base, &self.experts);
        merged(
            &self.place,
            &format!(
                "{base} {experts} {flags} --seqlen 512 --saliency-file s.safetensors --use-cpu --save {run}"
            ),
        )
    }

    fn of_base(&self, run: &str, flags: &str) -> Ran {
        self.merge(run, &format!("{flags} {}", self.wiki))
    }

    fn of_experts(&self, run: &str, flags: &str) -> Ran {
        let (wiki, stories) = (&self.wiki, &self.stories);
        self.merge(run, &format!("{flags} --saliency experts {wiki} {stories}"))
    }

    /// The three cases, each in the folder of its name followed by `suffix`.
    fn cases(&self, suffix: &str) {
        let of = |case: &str| format!("{case}{suffix}");
        self.of_base(&of("saliency-ties-base"), "--method ties --density 0.5 --saliency base");
        self.of_experts(&of("saliency-ties-experts"), "--method ties --density 0.3 --weight 1,0.7");
        self.of_experts(&of("regmean-diag"), "--method regmean_diag");
    }

    fn statistics(&self, name: &str) -> Tensors {
        tensors(&self.folder.join(format!("statistics.{name}.safetensors")))
    }

    fn golden(&self, case: &str) -> (Tensors, Value) {
        let json = fs::read(self.folder.join(format!("{case}.json"))).expect("a golden");
        let json = serde_json::from_slice(&json).expect("JSON");
        let tensors = tensors(&self.folder.join(format!("{case}.safetensors")));
        (tensors, json)
    }
}

const CASES: [&str; 3] = ["saliency-ties-base", "saliency-ties-experts", "regmean-diag"];

/// The largest difference of a tensor relative to its largest element, over all tensors.
fn largest_difference(found: &Tensors, expected: &Tensors) -> f64 {
    assert_eq!(found.len(), expected.len());
    let of_tensor = |(name, expected): (&String, &Vec<f64>)| {
        let found = &found[name];
        let largest = expected.iter().fold(0.0f64, |max, of| max.max(of.abs()));
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        differences.fold(0.0f64, f64::max) / largest
    };
    expected.iter().map(of_tensor).fold(0.0, f64::max)
}

/// The share of entries that differ from the base in both models or in none.
fn equal_kept(found: &Tensors, expected: &Tensors, base: &Tensors) -> f64 {
    let (mut equal, mut all) = (0, 0);
    for (name, base) in base {
        let both = found[name].iter().zip(&expected[name]);
        for ((found, expected), base) in both.zip(base) {
            // The goldens are computed in f64 and rounded: an entry that was not kept is within 1e-9 of the base.
            let kept = |value: &f64| (value - base).abs() > 1e-9;
            equal += usize::from(kept(found) == kept(expected));
            all += 1;
        }
    }
    equal as f64 / all as f64
}

#[test]
fn the_goldens_are_repeated_with_their_statistics_and_with_ours() {
    let Some(goldens) = Goldens::new() else {
        return;
    };
    let place = &goldens.place;
    goldens.cases("");
    let file = place.path("s.safetensors");
    let ours = tensors(&file);
    for (at, name) in STATISTICS.iter().enumerate() {
        for (vector, expected) in goldens.statistics(name) {
            let found = &ours[&format!("{at}.{vector}")];
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                let difference = (found - expected).abs() / expected;
                assert!(difference < 1e-5, "{name} {vector}: {found} {expected}");
            }
        }
    }
    let shared = shared().expect("found above");
    let base = tensors(&shared.join("models/stories260k/model.safetensors"));
    for case in CASES {
        let (expected, _) = goldens.golden(case);
        let equal = equal_kept(&model(place, case), &expected, &base);
        assert!(equal >= 0.9999, "{case}: {equal}");
    }

    for (at, name) in STATISTICS.iter().enumerate() {
        replace(&file, at, &goldens.statistics(name));
    }
    goldens.cases("-theirs");
    for case in CASES {
        let run = format!("{case}-theirs");
        let (expected, golden) = goldens.golden(case);
        let difference = largest_difference(&model(place, &run), &expected);
        assert!(difference < 1e-6, "{case}: {difference}");
        // The file has the experts' own statistics, so output errors are of them even where the base's choose.
        let errors = golden["output_error"].as_object().expect("errors");
        let report = report(place, &run);
        let linears = report.tensors.iter();
        let linears: Vec<_> =
            linears.filter_map(|tensor| Some((&tensor.name, tensor.output_errors?))).collect();
        assert_eq!(linears.len(), errors.len());
        for (name, found) in linears {
            let expected = errors[name].as_f64().expect("a number");
            let difference = (found.after - expected).abs() / expected;
            assert!(difference < 1e-5, "{case} {name}: {found:?} {expected}");
        }
    }
    // Nothing was measured the second time.
    let report = report(place, "regmean-diag-theirs");
    let saliency = report.saliency.as_ref().expect("statistics");
    assert_eq!(saliency.of.as_deref(), Some("experts"));
    assert_eq!(saliency.models.len(), 3, "{saliency:?}");
    assert_eq!(saliency.models[1].seqlen, 512);

    // The same merge without weighing is further from the outputs of the experts.
    goldens.merge("plain", "--method ties --density 0.3 --weight 1,0.7");
    let after = |run: &str| {
        let of = self::report(place, run);
        of.output_errors().expect("statistics").after
    };
    assert!(after("saliency-ties-experts-theirs") <= after("plain"));
    let ran = goldens.merge("plain-table", "--method linear");
    assert!(ran.stdout.contains("output error"), "{}", ran.stdout);
}

#[test]
fn an_expert_with_an_adapter_is_measured_as_the_model_that_it_makes() {
    let Some(goldens) = Goldens::new() else {
        return;
    };
    let (place, base) = (&goldens.place, &goldens.base);
    let folder = shared().expect("found above").join("models");
    let adapted = format!(
        "{}+{}",
        folder.join("stories260k").display(),
        folder.join("stories260k-experts/lora-wiki").display()
    );
    let flags = format!("--use-cpu --nsamples 3 --seqlen 100 {}", goldens.wiki);
    merged(place, &format!("{base} --model {adapted} --method linear --save folded"));
    for (run, expert) in [("a", adapted.as_str()), ("b", "folded/model")] {
        merged(
            place,
            &format!(
                "{base} --model {expert} --method ties --density 0.5 --saliency experts {flags} --save {run}"
            ),
        );
    }
    let of = |run: &str| tensors(&place.path(run).join("saliency.safetensors"));
    assert!(of("a") == of("b"));
    assert!(model(place, "a") == model(place, "b"));
}

/// A base `b` and experts `m` and `e` of random weights.
fn place() -> Place {
    let place = Place::empty();
    random(&place, "b", 2);
    random(&place, "m", 0);
    random(&place, "e", 1);
    place
}

fn random(place: &Place, name: &str, seed: u64) {
    let shape = RandomCheckpoint {
        num_hidden_layers: 3,
        dtype: StoredDtype::Bf16,
        seed,
        ..RandomCheckpoint::default()
    };
    place.checkpoint(name, &shape);
}

/// Measures two experts: 3 samples of 100 tokens.
const BOTH: &str = "--base b --model m --model e --method ties --density 0.5 --saliency experts \
    --dataset train.txt --nsamples 3 --seqlen 100 --save out";

/// The files of the statistics and of the model.
fn files(place: &Place) -> [Vec<u8>; 2] {
    ["out/saliency.safetensors", "out/model/model.safetensors"]
        .map(|name| fs::read(place.path(name)).expect(name))
}

#[test]
fn a_sample_that_a_gpu_has_no_memory_for_counts_once() {
    let place = place();
    merged(&place, &format!("{BOTH} --use-cpu"));
    let expected = files(&place);
    let run = |simulation: &str| {
        fs::remove_dir_all(place.path("out")).expect("removed");
        merged(&place, &format!("{BOTH} --device cuda --simulate {simulation}"));
        assert!(files(&place) == expected, "{simulation}");
        place.manifest("out")
    };
    let whole = run(r#"{"gpus":["2GiB"]}"#);
    assert!(whole.fallbacks.is_empty());
    // Of both models, per layer: norms and 7 matrices, 3 samples twice but for the last layer. Of the merge: its linears.
    let linears = 3 * 7;
    assert_eq!(whole.devices[0].units, 2 * (3 * (8 + 6) - 3) + linears);
    // Each model and the merge have their own devices, whose units count from 0.
    for unit in (0..39).step_by(2) {
        let run = run(&format!(r#"{{"gpus":["2GiB"],"refuse":"{unit}"}}"#));
        let refused = 2 + usize::from(unit < linears);
        assert_eq!(run.fallbacks.len(), refused, "unit {unit}: {:?}", run.fallbacks);
    }
    for refuse in ["10x1", "10x2", "10x4", "all"] {
        let run = run(&format!(r#"{{"gpus":["2GiB"],"refuse":"{refuse}"}}"#));
        assert!(!run.fallbacks.is_empty(), "{refuse}");
    }
}

/// Layers of both models in the file of an unfinished measurement.
fn measured_layers(place: &Place) -> [usize; 2] {
    let bytes = fs::read(place.path("out/saliency.safetensors"));
    let bytes = bytes.unwrap_or_default();
    let file = SafeTensors::deserialize(&bytes).ok();
    let names: Vec<String> =
        file.iter().flat_map(|file| file.names()).map(str::to_string).collect();
    [0, 1].map(|model| {
        let layer =
            |layer: &usize| names.contains(&format!("{model}.model.layers.{layer}.down_in"));
        (0..3).take_while(layer).count()
    })
}

#[test]
fn an_interrupted_measurement_continues_after_its_last_layer() {
    let place = place();
    let line = format!("merge {BOTH} --use-cpu");
    assert_eq!(place.run(&line).code, 0);
    let expected = files(&place);
    let mut continued = 0;
    for at in (1..).step_by(4) {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let mut command = place.command(&line);
        let ended = command.env("PRUNE_FAULT", format!("kill:{at}")).output();
        if ended.expect("the binary").status.code().is_some() {
            break;
        }
        let measured = measured_layers(&place);
        let ran = place.run(&line);
        for layers in measured.iter().filter(|layers| (1..3).contains(*layers)) {
            let continues = format!("{layers} of 3 layers are finished");
            assert!(
                ran.stderr.contains(&continues),
                "operation {at}: {measured:?}\n{}",
                ran.stderr
            );
        }
        let sessions = ran.stderr.matches("measuring the activations of ").count();
        let left = measured.iter().filter(|layers| **layers < 3).count();
        assert!(sessions <= left, "operation {at}: {measured:?}\n{}", ran.stderr);
        // All was finished but the removal of the state, or the run continues.
        assert_eq!(ran.code, 0, "operation {at}: {}", ran.stderr);
        assert!(files(&place) == expected, "operation {at}");
        continued += usize::from(ran.stderr.contains("layers are finished"));
    }
    assert!(continued > 1, "{continued}");
}

#[test]
fn files_of_other_statistics_are_refused() {
    let place = place();
    merged(&place, &format!("{BOTH} --use-cpu"));
    let refused = |flags: &str, says: &[&str]| {
        let line =
            format!("merge --base m --model e --method ties --density 0.5 --save other {flags}");
        let ran = place.run(&line);
        assert_ne!(ran.code, 0, "{flags}");
        for words in says {
            assert!(ran.stderr.contains(words), "{flags}: {}", ran.stderr);
        }
    };
    let ours = "--saliency-file out/saliency.safetensors";
    let of = |flags: &str| format!("--saliency base --dataset train.txt {ours} {flags}");
    refused(
        &of("--nsamples 3 --seqlen 50 --seed 1"),
        &["--seqlen: 100 there, 50 now", "--seed: 0 there, 1 now"],
    );
    refused(
        &of("--nsamples 3 --seqlen 100 --dataset test.txt --dataset test.txt"),
        &["--dataset is given 3 times"],
    );
    refused("--saliency-file m/model.safetensors", &["no file of activation statistics"]);
    refused("--saliency-file none", &["there are no statistics in `none`"]);
    refused("--aim 0.4", &["version 0.2 removed it", "--saliency base"]);
    for (name, seed) in [("m", 7), ("e", 8)] {
        fs::remove_dir_all(place.path(name)).expect("removed");
        random(&place, name, seed);
    }
    refused(
        &of("--nsamples 3 --seqlen 100"),
        &["holds statistics of other models", "measured: m, e"],
    );
}

/// The refusal names memory that is enough for the pass and for the measurement. A mistake in the measurement is named as it is.
#[test]
fn a_refused_measurement_names_what_is_enough_for_the_whole_merge() {
    let place = place();
    let line = "merge --base b --model m --method ties --density 0.5 --saliency base --nsamples 64 --seqlen 128 --save out";
    let refused = |flags: &str| {
        let ran = place.run(&format!("{line} {flags}"));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        ran.stderr
    };
    let stderr = refused("--dataset train.txt --max-memory cpu=1MiB");
    assert!(!place.path("out/model").exists(), "nothing is written");
    assert!(stderr.contains("measuring the activations needs more"), "{stderr}");
    let (_, hint) = stderr.split_once("--max-memory cpu=").expect("a budget");
    let least = hint.split("MiB").next().expect("a number");
    let ran = place.run(&format!("{line} --dataset train.txt --max-memory cpu={least}MiB"));
    assert_eq!(ran.code, 0, "{least}: {}", ran.stderr);
    let stderr = refused("--dataset missing.txt --max-memory cpu=1MiB --force");
    assert!(stderr.contains("missing.txt"), "{stderr}");
}
