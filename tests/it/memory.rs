//! Peak memory does not depend on the number of layers and equals the plan. Peak memory of tokenizing hardly depends on the text
//! and equals [`footprint`].
//!
//! The allocator of this test binary counts allocated bytes. Tests share a process, so a measurement runs in a child process: this
//! binary again, with the one test [`child`] or [`tokenizing_child`].
#![expect(unsafe_code, reason = "an allocator that counts can only be written so")]

mod on_device;
mod phases;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use prune::bytes::ByteSize;
use prune::data::footprint::{self, Encoding, TokenizerSize};
use prune::data::{Role, Source, TextCache, Tokenizer};
use prune::job;
use prune::linalg::product::Kernel;
use prune::linalg::{Products, StoredDtype};
use prune::model::{Dtypes, ModelConfig, WeightForms};
use prune::pipeline::{RunShape, TaskShape};
use prune::placement::{ExecutionOption, PhaseMemory, Processors, Workload};
use prune::pruning::Technique;
use prune::run::plan::PartKind;
use prune::run::{HiddenStatesStorage, MemorySettings, Phase, Silent};
use prune::runtime::Side;
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use crate::support::{Place, settings_of};

/// Counts bytes alive and their peak; hands everything on to the system.
struct Counting;

static ALIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Scratch memory of candle's products on the CPU does not count. It is aligned to cache lines, which no tensor is.
static SKIPS_SCRATCH: AtomicBool = AtomicBool::new(false);
const CACHE_LINE: usize = 64;

/// The bytes of an allocation that count.
fn counted(layout: Layout) -> usize {
    let is_skipped = layout.align() >= CACHE_LINE && SKIPS_SCRATCH.load(Ordering::Relaxed);
    if is_skipped { 0 } else { layout.size() }
}

fn add(bytes: usize) {
    let alive = ALIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(alive, Ordering::Relaxed);
}

fn remove(bytes: usize) {
    ALIVE.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every call goes to `System` with the caller's own arguments, whose contract is the same; counting touches only
// atomics and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(counted(layout));
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(counted(layout));
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        remove(counted(layout));
        // SAFETY: the caller got `pointer` from this allocator, so from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Counted as the change alone: the system moves large blocks without copying them.
        add(new_size.saturating_sub(layout.size()));
        remove(layout.size().saturating_sub(new_size));
        // SAFETY: as for `dealloc`, and the caller keeps the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// The file in which the child leaves its two numbers.
const TAKEN: &str = "taken";

/// The child's command line.
const ARGUMENTS: &str = "PRUNE_TEST_MEMORY_ARGUMENTS";

#[test]
#[ignore = "started by the other tests of this module, in a process of its own"]
fn child() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    let before = ALIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let manifest = job::prune(settings_of(&arguments).unwrap(), &Silent, None).unwrap();
    let peak = PEAK.load(Ordering::Relaxed) - before;
    let resident = manifest.peak_anonymous.map_or(0, |bytes| bytes.0);
    fs::write(TAKEN, format!("{peak} {resident}")).unwrap();
}

/// Tokenizes `text.txt` with the tokenizer of the folder, on two workers, with a cache if the argument asks for one.
#[test]
#[ignore = "started by the other tests of this module, in a process of its own"]
fn tokenizing_child() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global().unwrap();
    let cache = match arguments.as_str() {
        "cached" => TextCache::open(Some("cache".into())),
        _ => TextCache::disabled(),
    };
    let text = Source::find(&"text.txt".parse().unwrap(), Role::Evaluation).unwrap();
    let before = ALIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let tokenizer = Tokenizer::load(".".as_ref()).unwrap();
    let loading = PEAK.load(Ordering::Relaxed) - before;
    text.evaluation(&tokenizer, 128, None, &cache, &Silent).unwrap();
    let peak = PEAK.load(Ordering::Relaxed) - before;
    fs::write(TAKEN, format!("{peak} {loading}")).unwrap();
}

/// Memory of a run, in bytes.
#[derive(Debug, Clone, Copy)]
struct Taken {
    /// Allocated at once, at most.
    counted: u64,
    /// run.json's peak of anonymous memory; 0 where the system does not tell.
    resident: u64,
}

/// Runs the program in a child of its own, in `place`.
fn taken(place: &Place, arguments: &str) -> Taken {
    let (counted, resident) = measured(place, "child", arguments);
    Taken { counted, resident }
}

/// The two numbers that one of the children leaves.
fn measured(place: &Place, child: &str, arguments: &str) -> (u64, u64) {
    let module = module_path!().split_once("::").expect("a module of a test binary").1;
    let output = Command::new(std::env::current_exe().expect("this binary has a path"))
        .args(["--exact", &format!("{module}::{child}"), "--ignored", "--nocapture"])
        .current_dir(place.path("."))
        .env("PRUNE_CACHE", place.path(".cache"))
        .env(ARGUMENTS, arguments)
        .output()
        .expect("this binary can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(place.path(TAKEN)).expect("the child says what it took");
    let (first, second) = text.split_once(' ').expect("two numbers");
    (first.parse().expect("a number"), second.parse().expect("a number"))
}

const SEQLEN: usize = 256;
const SAMPLES: usize = 16;
const WINDOWS: usize = 12;
const THREADS: usize = 2;

fn shape(num_hidden_layers: usize, dtype: StoredDtype) -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 256,
        intermediate_size: 688,
        num_hidden_layers,
        dtype,
        ..RandomCheckpoint::default()
    }
}

/// Runs both depths and holds their peaks to each other; returns place and measurement of the deeper one.
fn flat_in_depth(dtype: StoredDtype, hidden_states: &str) -> (Place, Taken) {
    let run = |layers| {
        let place = Place::with(&shape(layers, dtype));
        let (seqlen, samples, windows, threads) =
            (SEQLEN.to_string(), SAMPLES.to_string(), WINDOWS.to_string(), THREADS.to_string());
        let taken = taken(
            &place,
            &format!(
                "--model m --sparsity-ratio 0.5 --eval both --save out --dataset train.txt \
                 --eval-dataset test.txt --nsamples {samples} --seqlen {seqlen} \
                 --eval-windows {windows} --threads {threads} --hidden-states {hidden_states}"
            ),
        );
        (place, taken)
    };
    // Four are the least where one is saved, one computed and one read at once, and one left over.
    let ((_, four), (place, twelve)) = (run(4), run(12));
    // Measured: 1 % at most, presumably what run.json keeps of every layer. A mask kept of each would be 7 %.
    let ratio = twelve.counted as f64 / four.counted as f64;
    assert!((0.97..1.03).contains(&ratio), "four layers take {four:?}, twelve {twelve:?}");
    eprintln!("four layers take {four:?}, twelve {twelve:?}");
    (place, twelve)
}

/// The arithmetic of a run without `--dtype` on this CPU.
fn automatic(dtype: StoredDtype) -> Products {
    match (dtype, Kernel::best_bf16()) {
        (StoredDtype::Bf16, Some(kernel)) => Products::Bf16(kernel),
        (StoredDtype::F16 | StoredDtype::F32, _) if Kernel::has_split() => Products::Split,
        _ => Products::F32,
    }
}

/// The phase of the peak that is planned for the run of [`flat_in_depth`], tokenizing left out: a text of a few kilobytes.
fn planned(place: &Place, dtype: StoredDtype, storage: HiddenStatesStorage) -> PhaseMemory {
    let config = ModelConfig::load(&place.path("m")).expect("just written");
    let job = RunShape {
        config: &config,
        dtypes: Dtypes::all(dtype),
        forms: &WeightForms::dense(),
        gpu_dtype: dtype,
        seqlen: SEQLEN,
        samples: SAMPLES,
        windows: WINDOWS,
        sides: &[Side::Dense, Side::Pruned],
        tasks: TaskShape::default(),
        against: None,
        observes: None,
        trains: None,
        of_all_ranks: None,
        shared_with: Vec::new(),
        flow: prune::pipeline::Flow::default(),
        technique: prune::pruning::method("wanda").map(Technique::of),
        saves: true,
        threads: THREADS,
        products: automatic(dtype),
        tokenizing: ByteSize::ZERO,
        retained: ByteSize::ZERO,
        settings: None,
    };
    let option = ExecutionOption {
        settings: MemorySettings::default(),
        storage,
        processors: Processors::Cpu,
    };
    let phases = job.layers(&option).and(job.head(&option)).host;
    let left_out = [Phase::Tokenize, Phase::SaveAndVerify];
    phases
        .into_iter()
        .filter(|memory| !left_out.contains(&memory.phase))
        .max_by_key(|memory| memory.bytes())
        .expect("a run has phases")
}

/// Bytes of the plan for the program itself, which the allocator of this binary does not count.
fn program(memory: &PhaseMemory) -> u64 {
    memory.of(PartKind::Program).0
}

#[test]
fn the_peak_does_not_grow_with_depth_and_is_what_was_planned() {
    let (place, taken) = flat_in_depth(StoredDtype::F32, "ram");
    within(&place, taken, StoredDtype::F32, HiddenStatesStorage::Ram);
}

#[test]
fn the_peak_with_hidden_states_on_disk_is_smaller_by_them() {
    let (place, taken) = flat_in_depth(StoredDtype::Bf16, "disk");
    within(&place, taken, StoredDtype::Bf16, HiddenStatesStorage::Disk);
}

/// Bytes outside the plan: the tokenizer.
const SLACK: u64 = 2 << 20;

/// Memory that is allocated and never touched is not resident, and the peak between phases is not measured. Measured: the resident peak was
/// 1.8 to 3.2 MiB above the counted one, which does not know the program itself.
const MARGIN: u64 = 1 << 20;

/// Free memory in the heaps of threads. Measured: nothing beyond the plan; 6 MiB where hidden states are allocated by whatever
/// thread computes them.
const HEAPS: u64 = 3 << 20;

#[track_caller]
fn within(place: &Place, taken: Taken, dtype: StoredDtype, storage: HiddenStatesStorage) {
    let memory = planned(place, dtype, storage);
    let with_program = memory.bytes().0;
    let planned = with_program - program(&memory);
    eprintln!("planned {planned}, {taken:?}");
    assert!(taken.counted <= planned + SLACK, "planned {planned}, {taken:?}");
    assert!(
        taken.counted >= planned / 2,
        "the plan is far too large: planned {planned}, {taken:?}"
    );
    if cfg!(target_os = "linux") {
        assert!(taken.resident + MARGIN >= taken.counted, "run.json forgets memory: {taken:?}");
        // Weights that are kept packed lie in the heap of the thread that packed them; what that comes to was not measured.
        assert!(
            automatic(dtype) != Products::F32 || taken.resident <= with_program + HEAPS,
            "freed memory is not used again: planned {planned}, {taken:?}"
        );
    }
}

/// A byte-level tokenizer with 58,000 merges of "Ġ" and up to four letters, of which texts are made.
fn large_tokenizer() -> (Value, Vec<String>) {
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut vocab = serde_json::Map::new();
    for token in letters.iter().cloned().chain(["Ġ".to_string()]) {
        let id = vocab.len();
        vocab.insert(token, json!(id));
    }
    let (mut merges, mut words) = (Vec::new(), vec!["Ġ".to_string()]);
    for most in [26, 676, 17_576, 40_000] {
        let longer = words.iter().flat_map(|word| letters.iter().map(move |letter| (word, letter)));
        let mut made = Vec::new();
        for (word, letter) in longer.take(most) {
            merges.push(json!([word, letter]));
            let id = vocab.len();
            made.push(format!("{word}{letter}"));
            vocab.insert(format!("{word}{letter}"), json!(id));
        }
        words = made;
    }
    let file = json!({
        "version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges}
    });
    (file, words)
}

#[test]
fn tokenizing_takes_what_was_planned_however_long_the_text_is() {
    let place = Place::empty();
    let (tokenizer, words) = large_tokenizer();
    fs::write(place.path("tokenizer.json"), tokenizer.to_string()).unwrap();
    let size = TokenizerSize::of(&place.path(".")).unwrap();
    let words: Vec<String> = words.iter().map(|word| word.replace('Ġ', " ")).collect();
    let of = |count: usize, arguments: &str| {
        // Steps of a prime: neighbouring words differ.
        let text: String = (0..count).map(|at| words[at * 7919 % words.len()].as_str()).collect();
        fs::write(place.path("text.txt"), &text).unwrap();
        let (peak, loading) = measured(&place, "tokenizing_child", arguments);
        let text = ByteSize(text.len() as u64);
        let spec = place.path("text.txt").display().to_string();
        let cache = TextCache::open(Some(place.path("cache")));
        let is_cached = Source::find(&spec.parse().unwrap(), Role::Evaluation)
            .and_then(|source| source.outlook(&place.path("."), &cache))
            .unwrap()
            .is_cached;
        let encoding = match is_cached {
            true => Encoding::Cached,
            false => Encoding::InPieces,
        };
        let planned = footprint::tokenize(size, Some(text), THREADS, encoding);
        eprintln!(
            "{text} of text, {} entries, cached: {is_cached}: planned {planned}, counted {} of which {} to load",
            size.entries,
            ByteSize(peak),
            ByteSize(loading)
        );
        (peak, loading, planned.0, text.0)
    };
    let (peak, loading, _, _) = of(20_000, "no cache");
    // The resident and planned memory of a tokenizer is above the counted one: see the formula.
    let planned = footprint::load_tokenizer(size).0;
    assert!(loading <= planned && loading >= planned / 2, "{loading} of {planned} planned");
    assert!(peak <= planned);
    // The text is one line: not even that is in memory.
    let (peak, _, planned, text) = of(2_000_000, "no cache");
    assert!(peak <= planned && peak >= planned / 2, "{peak} of {planned} planned");
    let in_one_call = Encoding::InOneCall;
    assert!(footprint::tokenize(size, Some(ByteSize(text)), THREADS, in_one_call).0 > 10 * peak);
    let _ = of(2_000_000, "cached");
    let (peak, _, planned, _) = of(2_000_000, "cached");
    assert!(peak <= planned && peak >= planned / 2, "{peak} of {planned} planned");
}
