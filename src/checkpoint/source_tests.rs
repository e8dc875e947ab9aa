//! Folders: opening, reading, and the exact messages of refusals.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::json;

use super::test_files::{
    counting, file_bytes, folder, mixed_tensors, write, write_index, write_sharded, write_single,
};
use super::{Checkpoint, WeightSource};

/// The error of `open`, with the folder's path replaced by `DIR`.
fn refusal(folder: &Path) -> String {
    match Checkpoint::open(folder) {
        Ok(_) => "opened".into(),
        Err(error) => error.to_string().replace(&folder.display().to_string(), "DIR"),
    }
}

#[test]
fn single_and_sharded_folders_hold_the_same_tensors() -> anyhow::Result<()> {
    let (single, sharded) = (folder(), folder());
    write_single(single.path(), Some("pt"));
    write_sharded(sharded.path());
    for place in [single.path(), sharded.path()] {
        let checkpoint = Checkpoint::open(place)?;
        assert_eq!(checkpoint.total_bytes().0, 200);
        for tensor in mixed_tensors() {
            let entry =
                checkpoint.entry(&tensor.name).ok_or_else(|| anyhow::anyhow!("{}", tensor.name))?;
            assert_eq!((entry.dtype, &entry.shape), (tensor.dtype, &tensor.shape));
            let mut bytes = vec![0; tensor.data.len()];
            checkpoint.read(entry, 0, &mut bytes)?;
            assert_eq!(bytes, tensor.data);
            let mut tail = vec![0; 8];
            checkpoint.read(entry, entry.bytes - 8, &mut tail)?;
            assert_eq!(tail, tensor.data[tensor.data.len() - 8..]);
            assert!(checkpoint.read(entry, entry.bytes - 7, &mut tail).is_err());
            assert!(checkpoint.read(entry, u64::MAX, &mut tail).is_err());
        }
    }
    let (one, two) = (Checkpoint::open(single.path())?, Checkpoint::open(sharded.path())?);
    assert_eq!(one.identity(), Checkpoint::open(single.path())?.identity());
    assert_ne!(one.identity(), two.identity());
    Ok(())
}

#[test]
fn require_names_what_is_missing_misshapen_or_quantised() -> anyhow::Result<()> {
    let dir = folder();
    write_single(dir.path(), Some("pt"));
    let checkpoint = Checkpoint::open(dir.path())?;
    let says = |name: &str, shape: &[usize]| match checkpoint.require(name, shape) {
        Ok(entry) => entry.name.clone(),
        Err(error) => error.to_string().replace(&dir.path().display().to_string(), "DIR"),
    };
    assert_eq!(says("a.weight", &[4, 8]), "a.weight");
    assert_eq!(
        says("x.weight", &[4, 8]),
        "tensor `x.weight` is missing in `DIR`\n  expected a tensor of shape [4, 8]\n\
         hint: check that config.json and the weights belong together, or download them again"
    );
    assert_eq!(
        says("a.weight", &[8, 4]),
        "tensor `a.weight` in `DIR/model.safetensors` has the wrong shape\n  expected [8, 4] by config.json, found [4, 8]\n\
         hint: check that config.json and the weights belong together, or download them again"
    );
    assert_eq!(
        says("d.ids", &[3]),
        "tensor `d.ids` in `DIR/model.safetensors` has an unsupported dtype\n  expected F32, F16 or BF16, found I64\n\
         hint: use the unquantised checkpoint"
    );
    Ok(())
}

#[test]
fn file_that_shrinks_after_opening_is_an_error() -> anyhow::Result<()> {
    let dir = folder();
    write_single(dir.path(), Some("pt"));
    let checkpoint = Checkpoint::open(dir.path())?;
    let file = fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors"))?;
    file.set_len(100)?;
    let entry = checkpoint.require("a.weight", &[4, 8])?;
    let error = checkpoint.read(entry, 0, &mut [0; 128]).err().map(|error| error.to_string());
    assert!(
        error.is_some_and(|text| text.contains("`a.weight`") && text.contains("became shorter"))
    );
    Ok(())
}

#[test]
fn missing_empty_and_foreign_folders_are_refused() {
    let dir = folder();
    let missing = dir.path().join("missing");
    assert_eq!(refusal(&missing), "there is no folder `DIR`");
    assert_eq!(refusal(dir.path()), "the folder `DIR` is empty");
    write(dir.path(), "README.md", b"");
    assert_eq!(
        refusal(dir.path()),
        "`DIR` holds no weights\n  neither `model.safetensors` nor `model.safetensors.index.json` is there"
    );
    write(dir.path(), "weights.gguf", b"");
    assert_eq!(
        refusal(dir.path()),
        "`DIR` holds GGUF weights, not safetensors\n  found `weights.gguf`\n\
         hint: use the checkpoint it was converted from"
    );
    write(dir.path(), "pytorch_model-00001-of-00002.bin", b"");
    assert_eq!(
        refusal(dir.path()),
        "`DIR` holds pickled weights, and loading a pickle can run code\n  \
         found `pytorch_model-00001-of-00002.bin`, no safetensors\n\
         hint: convert it where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; \
         M.from_pretrained('DIR').save_pretrained('DIR-safetensors', safe_serialization=True)\""
    );
    write(dir.path(), "adapter_model.safetensors", b"");
    assert_eq!(
        refusal(dir.path()),
        "`DIR` holds neither `model.safetensors` nor `model.safetensors.index.json`\n  \
         found `adapter_model.safetensors`\nhint: download the checkpoint again, its index at least"
    );
    let file = dir.path().join("README.md");
    assert!(
        refusal(&file)
            .starts_with("`DIR` is a file, not a checkpoint folder\nhint: pass its folder: `")
    );
}

#[test]
fn pickles_beside_safetensors_are_ignored() {
    let dir = folder();
    write_single(dir.path(), Some("pt"));
    write(dir.path(), "consolidated.00.pth", b"pickle");
    write(dir.path(), "pytorch_model.bin", b"pickle");
    write(dir.path(), "model.gguf", b"gguf");
    assert_eq!(refusal(dir.path()), "opened");
}

#[test]
fn missing_shard_is_named() -> anyhow::Result<()> {
    let dir = folder();
    write_sharded(dir.path());
    fs::remove_file(dir.path().join("model-00002-of-00002.safetensors"))?;
    assert_eq!(
        refusal(dir.path()),
        "shard `model-00002-of-00002.safetensors` is missing in `DIR`\n  \
         the index names 2 files, 1 of them are missing\nhint: download the checkpoint again, this file at least"
    );
    Ok(())
}

#[test]
fn index_may_not_lead_out_of_its_folder() {
    let dir = folder();
    for name in ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", ".."] {
        write_index(dir.path(), &json!({"a": name}));
        assert_eq!(
            refusal(dir.path()),
            format!(
                "cannot read `DIR/model.safetensors.index.json`: it names a file outside its folder\n  `{name}`\nhint: download this file again"
            )
        );
    }
    write_index(dir.path(), &json!({"a": "pytorch_model.bin"}));
    assert_eq!(
        refusal(dir.path()),
        "cannot read `DIR/model.safetensors.index.json`: it names a file that is not safetensors\n  `pytorch_model.bin`\nhint: download this file again"
    );
    write_index(dir.path(), &json!({}));
    assert_eq!(
        refusal(dir.path()),
        "cannot read `DIR/model.safetensors.index.json`: it names no tensors\nhint: download this file again"
    );
    write_index(dir.path(), &json!([1]));
    assert!(
        refusal(dir.path())
            .starts_with("cannot read `DIR/model.safetensors.index.json`: it is not a valid index")
    );
}

#[test]
fn index_and_shards_must_agree() {
    let dir = folder();
    write_sharded(dir.path());
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    write_index(dir.path(), &json!({"a.weight": one, "c.weight": one, "d.ids": two}));
    assert_eq!(
        refusal(dir.path()),
        format!(
            "shard `{one}` does not hold tensor `c.weight`\n  \
             the index in `DIR` says so, but it is in `{two}`\nhint: download the checkpoint again"
        )
    );
    write_index(dir.path(), &json!({"x": one}));
    assert_eq!(refusal(dir.path()), "opened", "a name that no file has may be needed by no one");
    // Tensors missing in the index are accepted, and copied like indexed tensors.
    write_index(dir.path(), &json!({"a.weight": one, "d.ids": two}));
    assert_eq!(refusal(dir.path()), "opened");
}

#[test]
fn tensor_in_two_shards_is_refused() {
    let dir = folder();
    write_sharded(dir.path());
    let again = file_bytes(Some("pt"), &[counting("a.weight", Dtype::F32, &[1])]);
    write(dir.path(), "model-00002-of-00002.safetensors", &again);
    assert_eq!(
        refusal(dir.path()),
        "tensor `a.weight` is in two files\n  \
         `model-00001-of-00002.safetensors` and `model-00002-of-00002.safetensors` in `DIR`\n\
         hint: download the checkpoint again into an empty folder"
    );
}
