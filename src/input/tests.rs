//! Tests of input files: kinds of content, and the table of contents and roles.

use super::*;

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n";
const HTML: &[u8] = b"\n <!DOCTYPE html>\n<html><body>404</body></html>";

fn contents() -> Vec<(&'static str, Vec<u8>, ContentKind)> {
    let utf16: Vec<u8> = "{\"text\": \"abc\"}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let swapped: Vec<u8> = "once upon a time".encode_utf16().flat_map(u16::to_be_bytes).collect();
    let marked = [&b"\xff\xfe"[..], &utf16].concat();
    let mut tar = vec![b'a'; 257];
    tar.extend_from_slice(b"ustar");
    // A header of 640 bytes has the first bytes of a pickle of protocol 2.
    let tensors = [&640u64.to_le_bytes()[..], b"{\"a\":"].concat();
    vec![
        ("lfs", LFS.to_vec(), ContentKind::LfsPointer),
        ("page", HTML.to_vec(), ContentKind::Page),
        ("answer", b"<?xml version=\"1.0\"?><Error>".to_vec(), ContentKind::Page),
        ("zip", b"PK\x03\x04\0\0".to_vec(), ContentKind::Zip),
        ("pickle", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), ContentKind::Pickle),
        ("pickle 4", b"\x80\x04\x95\x23\0\0\0\0\0\0\0}".to_vec(), ContentKind::Pickle),
        ("gguf", b"GGUF\x03\0\0\0".to_vec(), ContentKind::Gguf),
        ("arrow", b"ARROW1\0\0\xff\xff\xff\xff".to_vec(), ContentKind::ArrowFile),
        ("stream", b"\xff\xff\xff\xff\x78\0\0\0".to_vec(), ContentKind::ArrowStream),
        ("utf-16", marked, ContentKind::WideText("utf-16")),
        ("utf-16le", utf16, ContentKind::WideText("utf-16le")),
        ("utf-16be", swapped, ContentKind::WideText("utf-16be")),
        ("gzip", b"\x1f\x8b\x08\0".to_vec(), ContentKind::Gzip),
        ("parquet", b"PAR1\x15\x04".to_vec(), ContentKind::Parquet),
        ("zstd", b"\x28\xb5\x2f\xfd\0".to_vec(), ContentKind::Packed("a zstd file", "zstd -dc")),
        ("tar", tar, ContentKind::Packed("a tar archive", "tar -xOf")),
        ("safetensors", tensors, ContentKind::Safetensors),
        ("text", b"<unk> of <html-like> words".to_vec(), ContentKind::Other),
        ("markup", b"<htmlx> is no page".to_vec(), ContentKind::Other),
        ("empty", Vec::new(), ContentKind::Other),
        ("zeros", vec![0; 64], ContentKind::Other),
    ]
}

#[test]
fn every_kind_of_content_is_told_by_its_first_bytes() {
    for (name, bytes, expected) in contents() {
        assert_eq!(ContentKind::of(&bytes), expected, "{name}");
    }
}

/// Roles with a usual name, and the contents that each role takes. All contents not listed are refused with a remedy.
#[test]
fn content_must_agree_with_the_role_and_the_name_of_its_file() {
    use Expected::{Copied, Documents, Json, Parquet, Rows, Settings, Text, Weights};
    let plain = ["text", "markup", "empty", "zeros"];
    let with = |more: &[&'static str]| [&plain[..], more].concat();
    let folder = tempfile::tempdir().unwrap();
    let all_but_lfs = contents().into_iter().map(|(name, ..)| name);
    let all_but_lfs: Vec<_> = all_but_lfs.filter(|name| *name != "lfs").collect();
    for (expected, file, taken) in [
        (Weights, "model.safetensors", with(&["safetensors"])),
        (Json, "tokenizer.json", with(&[])),
        (Settings, "recipe.yml", with(&[])),
        (Text, "text.txt", with(&[])),
        (Text, "page.html", with(&["page", "answer"])),
        (Rows, "wiki.test.raw", with(&[])),
        (Rows, "test-00000-of-00001.parquet", vec!["parquet"]),
        (Rows, "blob", with(&["arrow", "stream", "parquet"])),
        (Documents, "c4.json.gz", with(&["gzip", "arrow", "stream", "parquet"])),
        (Documents, "x.arrow", vec!["arrow", "stream", "parquet"]),
        (Documents, "x.parquet", vec!["parquet"]),
        (Parquet, "x.parquet", vec!["parquet"]),
        (Copied, "tokenizer.model", all_but_lfs),
    ] {
        for (name, bytes, _) in contents() {
            let path = folder.path().join(file);
            std::fs::write(&path, bytes).unwrap();
            let opened = open(&path, expected);
            let case = format!("{name} as {file}");
            assert_eq!(opened.is_ok(), taken.contains(&name), "{case}");
            let Err(error) = opened else { continue };
            let failure = cannot_read(&path, &error);
            assert!(failure.message.contains("it is "), "{case}: {failure}");
            assert!(failure.hint.is_some(), "{case}: {failure}");
        }
    }
}

#[test]
fn remedies_name_the_tool_and_the_file() {
    for (name, expected, file, part) in [
        ("lfs", Expected::Json, "tokenizer.json", "lfs pull"),
        (
            "stream",
            Expected::Text,
            "a/test.arrow",
            "Dataset.from_file('a/test.arrow').to_parquet('a/test.parquet')",
        ),
        ("arrow", Expected::Text, "t.arrow", "pyarrow"),
        ("utf-16", Expected::Text, "u.txt", "iconv -f utf-16 -t utf-8 'u.txt' > 'utf8-u.txt'"),
        ("utf-16le", Expected::Json, "config.json", "iconv -f utf-16le"),
        ("gzip", Expected::Text, "a.txt", "gzip -dc 'a.txt' > 'unpacked-a.txt'"),
        ("zstd", Expected::Documents, "a.jsonl.zst", "zstd -dc 'a.jsonl.zst' > 'unpacked-a.jsonl'"),
        ("pickle", Expected::Weights, "model.safetensors", "weights_only=True"),
        ("gguf", Expected::Weights, "model.safetensors", "converted from"),
        ("parquet", Expected::Text, "a.txt", "mv 'a.txt' 'a.parquet'"),
        ("text", Expected::Parquet, "a.parquet", "mv 'a.parquet' 'a.jsonl'"),
        ("page", Expected::Text, "a.txt", "mv 'a.txt' 'a.html'"),
    ] {
        let (_, bytes, _) = contents().into_iter().find(|(other, ..)| *other == name).unwrap();
        let error = check(&bytes, expected, Path::new(file)).unwrap_err();
        let hint = cannot_read(Path::new(file), &error).hint.unwrap();
        assert!(hint.contains(part), "{name}: {hint}");
    }
}
