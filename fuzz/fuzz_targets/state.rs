//! `unfinished.json` beside the allocated files of a run: what is taken up of them.
#![no_main]

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use prune::checkpoint::{Checkpoint, CheckpointWriter};
use prune::job::folder::state_file::StateFile;
use prune::pipeline::expected;
use prune::pruning::Pattern;
use prune::run::Silent;

static SOURCE: LazyLock<Arc<Checkpoint>> = LazyLock::new(|| {
    let eos = prune_fuzz::put("m/eos", b"");
    let model = eos.parent().expect("the model's folder");
    let source = Arc::new(Checkpoint::open(model).expect("a good checkpoint"));
    let run = model.with_file_name("run");
    CheckpointWriter::create(&source, &run, &Silent).expect("a folder of ours");
    source
});

prune_fuzz::target!(input, {
    let source = &*SOURCE;
    let path = prune_fuzz::put("run/unfinished.json", input);
    let run = path.parent().expect("the run's folder");
    let Ok(Some(mut state)) = StateFile::read(run) else {
        return;
    };
    let _ = state.differences(&state.settings.clone());
    let reopened = CheckpointWriter::reopen(source, run, &state.tensors, &Silent);
    let (mut writer, damaged) = reopened.expect("the files can be read").expect("they are there");
    let damaged: BTreeSet<String> =
        damaged.iter().map(|tensor| expected::matrix_of(tensor).to_string()).collect();
    let names = state.keep_whole_layers(&damaged);
    writer.forget(names.iter().map(String::as_str));
    let _ = expected::masks_of(&state.layers);
    let _ = expected::expected_of(&state.layers, Pattern::Unstructured);
});
