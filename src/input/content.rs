//! Kinds of content, told by the first bytes of a file, and the remedy for a file of the wrong kind.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

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
    /// A part of WikiText: raw text, parquet or Arrow. A `.parquet` file must be parquet; `.raw`, `.tokens` and `.txt` must be text.
    Rows,
    /// Documents: JSON, gzipped or not, parquet or Arrow. A `.parquet` file must be parquet, and an `.arrow` file Arrow.
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
pub enum ContentKind {
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
    /// An archive or packed file without a variant of its own: its name, and the command that unpacks it.
    Packed(&'static str, &'static str),
    /// Text in UTF-8, or bytes of no known kind.
    Other,
}

/// Bytes that tell the kind of a file. The mark of `tar` lies furthest from the start, at byte 257.
pub(super) const LOOKED_AT: usize = 512;
/// The longest header of safetensors; the reader refuses files with a longer header.
const LONGEST_HEADER: u64 = 100_000_000;
/// Beginnings of a git-lfs pointer: today's, and the beginning in its first versions.
const POINTERS: [&[u8]; 2] =
    [b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/"];

impl ContentKind {
    /// The kind of a file that begins with these bytes.
    pub fn of(start: &[u8]) -> Self {
        let begins = |magic: &[u8]| start.starts_with(magic);
        // The length of a header may look like the magic of a different kind, so the brace after it decides first.
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
            // The length of the first message: a multiple of eight bytes.
            [0xff, 0xff, 0xff, 0xff, low, _, _, 0, ..] if low % 8 == 0 => {
                return Self::ArrowStream;
            }
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

    pub(super) fn noun(self) -> String {
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
    pub(super) fn fits(self, expected: Expected, path: &Path) -> bool {
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
            (Expected::Rows | Expected::Documents, Self::ArrowStream | Self::ArrowFile) => {
                !is_named(&["parquet", "raw", "tokens", "txt"])
            }
            (Expected::Rows | Expected::Documents, Self::Other) => !is_named(&["parquet", "arrow"]),
            (Expected::Documents, Self::Gzip) => !is_named(&["parquet", "arrow"]),
            (Expected::Parquet, Self::Other) => false,
            (Expected::Text, Self::Page) => is_named(&["html", "htm", "xhtml", "xml", "svg"]),
            (_, found) => found == Self::Other,
        }
    }

    /// The fix to type for a file of this content.
    pub(super) fn remedy(self, expected: Expected, path: &Path) -> String {
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

/// The bytes that tell the kind of a file.
pub(super) fn beginning(file: &mut File) -> io::Result<Vec<u8>> {
    let mut start = Vec::with_capacity(LOOKED_AT);
    file.take(LOOKED_AT as u64).read_to_end(&mut start)?;
    Ok(start)
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
    // A few letters that are not Latin may stand between the Latin letters.
    let is_wide = |zeros: usize| pairs.len() >= 4 && zeros * 10 >= pairs.len() * 7;
    let is_text = |at: usize| pairs.iter().all(|pair| pair[at] != 0);
    match () {
        () if is_wide(zeros(1)) && is_text(0) => Some("utf-16le"),
        () if is_wide(zeros(0)) && is_text(1) => Some("utf-16be"),
        () => None,
    }
}
