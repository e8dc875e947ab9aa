//! Input files, all opened here: the first bytes of a file must agree with its role and its name.
//!
//! A download that failed half-way leaves other content under the right name: a git-lfs pointer, an HTML page, an archive. Read as
//! text, such content gives a wrong result without an error. So every file that a user or a publisher supplies is opened through
//! [`open`], [`read`], [`read_settings`] or [`read_given`], with the content that the caller expects. Other content is an
//! [`io::Error`] that holds a [`Mismatch`]; [`cannot_read`] turns it into a [`Failure`] with the remedy. Files of the program's own
//! runs (locks, caches, records) are read through [`crate::bytes`].

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;

use crate::bytes::{ByteSize, LARGEST_SETTINGS, read_up_to, regular_file};
use crate::failure::Failure;

/// The content that a caller reads, by the role of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Tensors in safetensors.
    Weights,
    /// A JSON file: configuration, tokenizer, index, record.
    Json,
    /// Text for the program: a recipe, a device map, a chat template, a certificate.
    Settings,
    /// Text for the model, as it is: a plain text, a prompt. Pages are text under the name of a page (`.html`, `.xml`).
    Text,
    /// A part of WikiText: raw text or parquet. A `.parquet` file must be parquet; `.raw`, `.tokens` and `.txt` must be text.
    Rows,
    /// Documents: JSON lines, gzipped or not, or parquet. A `.parquet` file must be parquet.
    Documents,
    /// Parquet.
    Parquet,
    /// Any content, which is copied or hashed. Only the stand-in of git-lfs is refused.
    Copied,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "the weights",
            Self::Json => "JSON",
            Self::Settings | Self::Text => "text",
            Self::Rows => "WikiText",
            Self::Documents => "documents",
            Self::Parquet => "parquet",
            Self::Copied => "the file itself",
        })
    }
}

/// A kind of content that its first bytes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A header of safetensors.
    Safetensors,
    /// The stand-in of git-lfs for a large file.
    LfsPointer,
    /// An HTML page, or an XML answer of a server.
    Page,
    /// A zip archive, which `torch.save` writes, too.
    Zip,
    /// A Python pickle, the older form of `torch.save`.
    Pickle,
    /// Weights of llama.cpp.
    Gguf,
    /// An Arrow file.
    ArrowFile,
    /// An Arrow stream, as the `datasets` library keeps its cache.
    ArrowStream,
    /// Text in UTF-16 or UTF-32: its name for `iconv`.
    WideText(&'static str),
    /// Gzip.
    Gzip,
    /// Parquet.
    Parquet,
    /// Another archive or packed file: its name, and the command that unpacks it.
    Packed(&'static str, &'static str),
    /// Text in UTF-8, or bytes of no known kind.
    Other,
}

/// Bytes that tell the kind of a file. The mark of `tar` is the last one, at byte 257.
const LOOKED_AT: usize = 512;
/// The longest header of safetensors; files with a longer one are refused by its reader.
const LONGEST_HEADER: u64 = 100_000_000;
/// Beginnings of a git-lfs pointer: today's, and the one of its first versions.
const POINTERS: [&[u8]; 2] = [
    b"version https://git-lfs.github.com/spec/",
    b"version https://hawser.github.com/spec/",
];

impl Content {
    /// The kind of a file that begins with these bytes.
    pub fn of(start: &[u8]) -> Self {
        let begins = |magic: &[u8]| start.starts_with(magic);
        // The length of a header may look like another magic, so the brace after it decides first.
        if let Some((length, [b'{', ..])) = start.split_first_chunk::<8>()
            && u64::from_le_bytes(*length) <= LONGEST_HEADER
        {
            return Self::Safetensors;
        }
        match start {
            [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => return Self::WideText("utf-32"),
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => return Self::WideText("utf-16"),
            // A protocol from 2 to 5, and the code of an operation, which is never 0.
            [0x80, 2..=5, 1..=0xff, ..] => return Self::Pickle,
            [0xff, 0xff, 0xff, 0xff, _, _, _, _, ..] => return Self::ArrowStream,
            [0x1f, 0x8b, ..] => return Self::Gzip,
            _ => {}
        }
        if POINTERS.iter().any(|pointer| begins(pointer)) {
            Self::LfsPointer
        } else if begins(b"PK\x03\x04") || begins(b"PK\x05\x06") {
            Self::Zip
        } else if begins(b"GGUF") {
            Self::Gguf
        } else if begins(b"ARROW1") {
            Self::ArrowFile
        } else if begins(b"PAR1") {
            Self::Parquet
        } else if begins(b"\x28\xb5\x2f\xfd") {
            Self::Packed("a zstd file", "zstd -dc")
        } else if begins(b"BZh") && start.get(4..10) == Some(&b"1AY&SY"[..]) {
            Self::Packed("a bzip2 file", "bzip2 -dc")
        } else if begins(b"\xfd7zXZ\0") {
            Self::Packed("an xz file", "xz -dc")
        } else if begins(b"7z\xbc\xaf\x27\x1c") {
            Self::Packed("a 7z archive", "7z x -so")
        } else if start.get(257..262) == Some(b"ustar") {
            Self::Packed("a tar archive", "tar -xOf")
        } else if is_page(start) {
            Self::Page
        } else {
            wide_text(start).map_or(Self::Other, Self::WideText)
        }
    }

    /// The kind of a file that exists; a file that cannot be read is of no known kind.
    pub fn of_file(path: &Path) -> Self {
        File::open(path)
            .and_then(|mut file| beginning(&mut file))
            .map_or(Self::Other, |start| Self::of(&start))
    }

    fn noun(self) -> String {
        match self {
            Self::Safetensors => "a file of safetensors".into(),
            Self::LfsPointer => "a git-lfs pointer".into(),
            Self::Page => "an HTML or XML page".into(),
            Self::Zip => "a zip archive, as `torch.save` writes it".into(),
            Self::Pickle => "a Python pickle, and loading a pickle can run code".into(),
            Self::Gguf => "a GGUF file".into(),
            Self::ArrowFile => "an Arrow file".into(),
            Self::ArrowStream => "an Arrow stream of the `datasets` library".into(),
            Self::WideText(encoding) => {
                format!("text in {}", encoding[..6].to_uppercase())
            }
            Self::Gzip => "a gzip file".into(),
            Self::Parquet => "a parquet file".into(),
            Self::Packed(noun, _) => noun.into(),
            Self::Other => "of no known kind".into(),
        }
    }

    /// Returns whether a file of this content may stand in a role under its name.
    fn fits(self, expected: Expected, path: &Path) -> bool {
        let ending = path.extension().unwrap_or_default().to_string_lossy();
        let is_named = |endings: &[&str]| {
            let mut endings = endings.iter();
            endings.any(|other| ending.eq_ignore_ascii_case(other))
        };
        match (expected, self) {
            (Expected::Copied, _) => self != Self::LfsPointer,
            (Expected::Weights, Self::Safetensors) => true,
            (Expected::Rows | Expected::Documents | Expected::Parquet, Self::Parquet) => {
                !is_named(&["raw", "tokens", "txt"])
            }
            (Expected::Rows | Expected::Documents, Self::Other) => !is_named(&["parquet"]),
            (Expected::Documents, Self::Gzip) => !is_named(&["parquet"]),
            (Expected::Parquet, Self::Other) => false,
            (Expected::Text, Self::Page) => is_named(&["html", "htm", "xhtml", "xml", "svg"]),
            (_, found) => found == Self::Other,
        }
    }

    /// The fix to type for a file of this content.
    fn remedy(self, expected: Expected, path: &Path) -> String {
        let shown = path.display();
        let renamed = |ending: &str| path.with_extension(ending).display().to_string();
        match self {
            Self::LfsPointer => {
                let folder = path.parent().filter(|folder| folder.is_dir());
                let folder = folder.unwrap_or(Path::new("."));
                format!(
                    "run `git lfs pull` in that folder: git -C '{}' lfs pull",
                    folder.display()
                )
            }
            Self::Page if expected == Expected::Text => format!(
                "download the text itself; if the page is the text, name it so: mv '{shown}' '{}'",
                renamed("html")
            ),
            Self::Page => {
                "download the file itself; a server answered with a page, as it does for a wrong address or without a login".into()
            }
            Self::Zip | Self::Pickle if expected == Expected::Weights => format!(
                "convert it where you trust it: python -c \"import torch, safetensors.torch as s; \
                 s.save_file(torch.load('{shown}', map_location='cpu', weights_only=True), '{}')\"",
                renamed("new.safetensors")
            ),
            Self::Zip => format!("if it is an archive, unpack it (unzip '{shown}') and name the file in it"),
            Self::Pickle => "name a text, JSON lines or parquet; pickles are never opened".into(),
            Self::Gguf => "use the checkpoint in safetensors that it was converted from".into(),
            Self::Safetensors => "name the model's folder with --model, and a text or a configuration here".into(),
            Self::ArrowStream => format!(
                "convert it: python -c \"from datasets import Dataset; Dataset.from_file('{shown}').to_parquet('{}')\"",
                renamed("parquet")
            ),
            Self::ArrowFile => format!(
                "convert it: python -c \"import pyarrow as a, pyarrow.parquet as p; \
                 p.write_table(a.ipc.open_file('{shown}').read_all(), '{}')\"",
                renamed("parquet")
            ),
            Self::WideText(encoding) => format!(
                "convert it: iconv -f {encoding} -t utf-8 '{shown}' > '{}'",
                path.with_file_name(format!("utf8-{}", name_of(path))).display()
            ),
            Self::Gzip => format!(
                "unpack it: gzip -dc '{shown}' > '{}'",
                path.with_file_name(format!("unpacked-{}", name_of(path))).display()
            ),
            Self::Packed(_, command) => format!(
                "unpack it: {command} '{shown}' > '{}'",
                path.with_file_name(format!("unpacked-{}", name_of(path))).display()
            ),
            Self::Parquet => format!(
                "name it as what it is: mv '{shown}' '{}'",
                renamed("parquet")
            ),
            Self::Other => format!(
                "copy the file again; JSON lines need another name: mv '{shown}' '{}'",
                renamed("jsonl")
            ),
        }
    }
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let packed = [".gz", ".zst", ".bz2", ".xz", ".7z", ".tar", ".tgz"];
    let mut endings = packed.iter().filter_map(|ending| name.strip_suffix(ending));
    endings.next().unwrap_or(&name).to_owned()
}

/// Returns whether a text is a page: markup of HTML, or an XML answer of a store. A text that merely begins with `<` is none.
fn is_page(start: &[u8]) -> bool {
    let text = start.strip_prefix("\u{feff}".as_bytes()).unwrap_or(start);
    let text = text.trim_ascii_start();
    let word = |word: &[u8]| {
        let (Some(begin), next) = (text.get(..word.len()), text.get(word.len())) else {
            return false;
        };
        begin.eq_ignore_ascii_case(word)
            && next.is_none_or(|next| next.is_ascii_whitespace() || *next == b'>')
    };
    word(b"<!doctype html") || word(b"<html") || word(b"<?xml")
}

/// The encoding of a text without a mark in which every second byte is 0, as it is in UTF-16 of Latin letters.
fn wide_text(start: &[u8]) -> Option<&'static str> {
    let pairs: Vec<&[u8]> = start.chunks_exact(2).collect();
    let zeros = |at: usize| pairs.iter().filter(|pair| pair[at] == 0).count();
    // A few other letters may stand between the Latin ones.
    let is_wide = |zeros: usize| pairs.len() >= 4 && zeros * 10 >= pairs.len() * 7;
    let is_text = |at: usize| pairs.iter().all(|pair| pair[at] != 0);
    match () {
        () if is_wide(zeros(1)) && is_text(0) => Some("utf-16le"),
        () if is_wide(zeros(0)) && is_text(1) => Some("utf-16be"),
        () => None,
    }
}

/// Content that does not agree with the role and the name of its file. It travels inside an [`io::Error`].
#[derive(Debug)]
pub struct Mismatch {
    found: Content,
    expected: Expected,
    remedy: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, expected, .. } = self;
        write!(f, "it is {}, not {expected}", found.noun())
    }
}

impl std::error::Error for Mismatch {}

/// Checks the first bytes of a file that is read without being opened here, such as the text inside an archive.
///
/// # Errors
/// Fails with a [`Mismatch`] for content that does not agree with the role or the name.
pub fn check(start: &[u8], expected: Expected, path: &Path) -> io::Result<()> {
    let found = Content::of(&start[..start.len().min(LOOKED_AT)]);
    if found.fits(expected, path) {
        return Ok(());
    }
    Err(io::Error::other(Mismatch {
        found,
        expected,
        remedy: found.remedy(expected, path),
    }))
}

/// Opens a file, at its beginning.
///
/// # Errors
/// Fails when it cannot be opened or read, and for content that does not agree with its role or its name.
pub fn open(path: &Path, expected: Expected) -> io::Result<File> {
    let mut file = File::open(path)?;
    check(&beginning(&mut file)?, expected, path)?;
    file.rewind()?;
    Ok(file)
}

fn beginning(file: &mut File) -> io::Result<Vec<u8>> {
    let mut start = Vec::with_capacity(LOOKED_AT);
    file.take(LOOKED_AT as u64).read_to_end(&mut start)?;
    Ok(start)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// Fails as [`open`], when the file is larger, and for a folder, a pipe or a device: these may never end.
pub fn read(path: &Path, most: ByteSize, expected: Expected) -> io::Result<Vec<u8>> {
    regular_file(path)?;
    let bytes = read_up_to(File::open(path)?, most)?;
    check(&bytes, expected, path)?;
    Ok(bytes)
}

/// Reads a file of settings as text; it must be a regular file of at most [`LARGEST_SETTINGS`].
///
/// # Errors
/// Fails as [`read`], and for bytes that are not UTF-8.
pub fn read_settings(path: &Path) -> io::Result<String> {
    let expected = match path.extension().is_some_and(|ending| ending == "json") {
        true => Expected::Json,
        false => Expected::Settings,
    };
    text(read(path, LARGEST_SETTINGS, expected)?)
}

/// Reads a text that the command line names. It may be a pipe, like `<(command)` in a shell.
///
/// # Errors
/// Fails when it cannot be read or is larger than [`LARGEST_SETTINGS`], for content that does not agree with its role or its name,
/// and for bytes that are not UTF-8.
pub fn read_given(path: &Path, expected: Expected) -> io::Result<String> {
    let bytes = read_up_to(File::open(path)?, LARGEST_SETTINGS)?;
    check(&bytes, expected, path)?;
    text(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::other(format!("it is not UTF-8 text from byte {at} on"))
    })
}

/// The failure for an input file that cannot be opened or read, with the remedy for content that does not agree with it.
pub fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("cannot read `{}`: {error}", path.display()));
    with_remedy(failure, error)
}

/// Adds to a failure the remedy for content that does not agree with its file, if this is the error.
pub fn with_remedy(failure: Failure, error: &io::Error) -> Failure {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(Mismatch { remedy, .. }) => failure.hint(remedy),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n";
    const HTML: &[u8] = b"\n <!DOCTYPE html>\n<html><body>404</body></html>";

    fn contents() -> Vec<(&'static str, Vec<u8>, Content)> {
        let utf16: Vec<u8> = "{\"text\": \"abc\"}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let swapped: Vec<u8> = "once upon a time".encode_utf16().flat_map(u16::to_be_bytes).collect();
        let marked = [&b"\xff\xfe"[..], &utf16].concat();
        let mut tar = vec![b'a'; 257];
        tar.extend_from_slice(b"ustar");
        // A header of 640 bytes has the first bytes of a pickle of protocol 2.
        let tensors = [&640u64.to_le_bytes()[..], b"{\"a\":"].concat();
        vec![
            ("lfs", LFS.to_vec(), Content::LfsPointer),
            ("page", HTML.to_vec(), Content::Page),
            ("answer", b"<?xml version=\"1.0\"?><Error>".to_vec(), Content::Page),
            ("zip", b"PK\x03\x04\0\0".to_vec(), Content::Zip),
            ("pickle", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), Content::Pickle),
            ("pickle 4", b"\x80\x04\x95\x23\0\0\0\0\0\0\0}".to_vec(), Content::Pickle),
            ("gguf", b"GGUF\x03\0\0\0".to_vec(), Content::Gguf),
            ("arrow", b"ARROW1\0\0\xff\xff\xff\xff".to_vec(), Content::ArrowFile),
            ("stream", b"\xff\xff\xff\xff\x78\0\0\0".to_vec(), Content::ArrowStream),
            ("utf-16", marked, Content::WideText("utf-16")),
            ("utf-16le", utf16, Content::WideText("utf-16le")),
            ("utf-16be", swapped, Content::WideText("utf-16be")),
            ("gzip", b"\x1f\x8b\x08\0".to_vec(), Content::Gzip),
            ("parquet", b"PAR1\x15\x04".to_vec(), Content::Parquet),
            ("zstd", b"\x28\xb5\x2f\xfd\0".to_vec(), Content::Packed("a zstd file", "zstd -dc")),
            ("tar", tar, Content::Packed("a tar archive", "tar -xOf")),
            ("safetensors", tensors, Content::Safetensors),
            ("text", b"<unk> of <html-like> words".to_vec(), Content::Other),
            ("markup", b"<htmlx> is no page".to_vec(), Content::Other),
            ("empty", Vec::new(), Content::Other),
            ("zeros", vec![0; 64], Content::Other),
        ]
    }

    #[test]
    fn every_kind_of_content_is_told_by_its_first_bytes() {
        for (name, bytes, expected) in contents() {
            assert_eq!(Content::of(&bytes), expected, "{name}");
        }
    }

    /// Roles with a usual name, and the contents that each of them takes. All others are refused with a remedy.
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
            (Rows, "blob", with(&["parquet"])),
            (Documents, "c4.json.gz", with(&["gzip", "parquet"])),
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
            ("stream", Expected::Documents, "a/test.arrow", "Dataset.from_file('a/test.arrow').to_parquet('a/test.parquet')"),
            ("arrow", Expected::Documents, "t.arrow", "pyarrow"),
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
}
