//! Wrong headers: each kind has its message, and no mutation panics, allocates too much or opens wrongly.

use std::path::Path;

use proptest::prelude::*;

use super::test_files::{file_bytes, file_with_header, folder, mixed_tensors, write};
use super::{Checkpoint, WeightSource};

/// The error of `open` for a folder that holds only this file, without the folder's path.
fn message(file: &[u8]) -> String {
    let folder = folder();
    write(folder.path(), "model.safetensors", file);
    match Checkpoint::open(folder.path()) {
        Ok(_) => "opened".into(),
        Err(error) => error.to_string().replace(&format!("{}/", folder.path().display()), ""),
    }
}

fn first_line(file: &[u8]) -> String {
    message(file).lines().next().unwrap_or_default().into()
}

fn with_header(json: &str, data_bytes: usize) -> String {
    first_line(&file_with_header(json, data_bytes))
}

#[test]
fn truncated_data_says_how_many_bytes_are_missing() {
    let mut file = file_bytes(Some("pt"), &mixed_tensors());
    file.truncate(file.len() - 10);
    // 4·8·4 + 2·8·2 + 2·4·2 + 3·8 = 128 + 32 + 16 + 24 = 200 bytes.
    assert_eq!(
        message(&file),
        "cannot read `model.safetensors`: it is truncated, 10 bytes are missing\n  \
         its tensors need 200 B (200 bytes), 190 B (190 bytes) are there\n\
         hint: download this file again"
    );
}

#[test]
fn trailing_bytes_are_refused() {
    let mut file = file_bytes(Some("pt"), &mixed_tensors());
    file.extend_from_slice(&[0; 3]);
    assert_eq!(
        first_line(&file),
        "cannot read `model.safetensors`: 3 bytes follow its last tensor"
    );
}

#[test]
fn header_length_is_judged_before_it_is_allocated() {
    let mut file = file_bytes(Some("pt"), &mixed_tensors());
    file[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(first_line(&file), "cannot read `model.safetensors`: it is not a safetensors file");
    file[..8].copy_from_slice(&99_999_999u64.to_le_bytes());
    assert_eq!(
        first_line(&file),
        "cannot read `model.safetensors`: it is truncated inside its header"
    );
    assert_eq!(
        first_line(b"1234567"),
        "cannot read `model.safetensors`: 7 bytes are too few for a safetensors file"
    );
}

#[test]
fn offsets_that_overlap_leave_holes_or_run_backwards_are_refused() {
    let two = |second: &str| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"b":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#
        )
    };
    let says = |second: &str| with_header(&two(second), 16);
    assert_eq!(says("[8,16]"), "opened");
    assert_eq!(
        says("[4,12]"),
        "cannot read `model.safetensors`: tensor `b` overlaps its neighbour"
    );
    assert_eq!(
        says("[12,20]"),
        "cannot read `model.safetensors`: there is a hole before tensor `b`"
    );
    assert_eq!(
        says("[16,8]"),
        "cannot read `model.safetensors`: tensor `b` ends at byte 8, before its start 16"
    );
}

#[test]
fn shapes_that_overflow_or_do_not_fit_their_bytes_are_refused() {
    let one = |dtype: &str, shape: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,8]}}}}"#)
    };
    let says = |dtype: &str, shape: &str| with_header(&one(dtype, shape), 8);
    assert_eq!(
        says("F32", "[4294967296,4294967296]"),
        "cannot read `model.safetensors`: tensor `a` has an impossible shape [4294967296, 4294967296]"
    );
    assert_eq!(
        says("F32", "[3]"),
        "cannot read `model.safetensors`: tensor `a` does not fit its bytes"
    );
    assert_eq!(
        says("F16", "[2]"),
        "cannot read `model.safetensors`: tensor `a` does not fit its bytes"
    );
    for header in
        [one("F99", "[2]"), one("F32", "[-2]"), one("F32", "[2.5]"), "[]".into(), "{".into()]
    {
        assert_eq!(
            with_header(&header, 8),
            "cannot read `model.safetensors`: its header is not valid"
        );
    }
}

#[test]
fn a_name_twice_in_one_header_is_refused() {
    let json = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(message(&file_with_header(json, 1)).contains("`a` appears twice"));
}

/// Every tensor of an accepted header can be read: no range leaves its file.
fn opens_whole_or_not_at_all(folder: &Path) -> Result<(), TestCaseError> {
    if let Ok(checkpoint) = Checkpoint::open(folder) {
        for entry in checkpoint.tensors() {
            prop_assert!(entry.bytes <= 4096);
            let mut buffer = vec![0; entry.bytes as usize];
            prop_assert!(checkpoint.read(entry, 0, &mut buffer).is_ok());
            prop_assert!(entry.elements() as u64 <= entry.bytes * 2);
        }
        let _ = checkpoint.identity();
    }
    Ok(())
}

proptest! {
    #[test]
    fn flipped_bytes_never_panic(flips in prop::collection::vec((0usize..600, any::<u8>()), 1..4)) {
        let mut file = file_bytes(Some("pt"), &mixed_tensors());
        let length = file.len();
        for (at, byte) in flips {
            file[at % length] = byte;
        }
        let folder = folder();
        write(folder.path(), "model.safetensors", &file);
        opens_whole_or_not_at_all(folder.path())?;
    }

    #[test]
    fn cut_files_are_always_refused(keep in 0.0f64..1.0) {
        let mut file = file_bytes(Some("pt"), &mixed_tensors());
        file.truncate((file.len() as f64 * keep) as usize);
        prop_assert!(message(&file) != "opened");
    }

    #[test]
    fn any_header_length_never_panics(length in any::<u64>(), shift in 0u32..64) {
        let mut file = file_bytes(Some("pt"), &mixed_tensors());
        file[..8].copy_from_slice(&(length >> shift).to_le_bytes());
        let folder = folder();
        write(folder.path(), "model.safetensors", &file);
        opens_whole_or_not_at_all(folder.path())?;
    }

    #[test]
    fn any_numbers_in_a_header_never_panic(
        tensors in prop::collection::vec(
            (
                prop::sample::select(vec!["F32", "F16", "BF16", "I64", "F4", "BOOL"]),
                prop::collection::vec(prop_oneof![0u64..5, any::<u64>()], 0..4),
                prop_oneof![0u64..40, any::<u64>()],
                prop_oneof![0u64..40, any::<u64>()],
            ),
            0..4,
        ),
        data_bytes in 0usize..64,
    ) {
        let fields: Vec<String> = tensors
            .iter()
            .enumerate()
            .map(|(at, (dtype, shape, start, end))| {
                format!(r#""t{at}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
            })
            .collect();
        let file = file_with_header(&format!("{{{}}}", fields.join(",")), data_bytes);
        let folder = folder();
        write(folder.path(), "model.safetensors", &file);
        opens_whole_or_not_at_all(folder.path())?;
    }
}
