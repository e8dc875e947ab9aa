//! A folder for data that is slow to compute: unpacked documents, and token ids.
//!
//! Several processes may share the folder: every file is written under a temporary name and then renamed, and never changed afterwards. A
//! file that does not match its hash counts as absent, and a failed write is a warning. Deleting the folder is always safe.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::digest;
use super::line_memory::LineMemory;
use super::staged::{self, Staged};
use crate::run::Events;

/// First bytes of a file of token ids; the digit is the layout's version.
const TOKENS_MAGIC: &[u8; 8] = b"PRNTOK1\n";
/// Magic, count (u64 LE), SHA-256 of the ids that follow as u32 LE.
const TOKENS_HEADER: usize = 8 + 8 + 32;
/// Ids read or written at once.
const CHUNK: usize = 1 << 16;

/// The folder of the cache, if it is enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextCache {
    folder: Option<PathBuf>,
    lines: LineMemory,
}

impl TextCache {
    /// The cache in `folder`, else in `$PRUNE_CACHE`, `$XDG_CACHE_HOME/prune` or `~/.cache/prune`. If none of these is set, the
    /// cache is disabled. A folder is created by the first write. Removes the unfinished files of processes that have ended.
    pub fn open(folder: Option<PathBuf>) -> Self {
        let variable =
            |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = folder
            .or_else(|| variable("PRUNE_CACHE"))
            .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("prune")))
            .or_else(|| variable("HOME").map(|path| path.join(".cache").join("prune")));
        if let Some(folder) = &folder {
            staged::remove_abandoned(folder);
        }
        Self { folder, lines: LineMemory::UNBOUNDED }
    }

    /// The same cache for texts whose lines are bounded.
    #[must_use]
    pub fn with_lines(self, lines: LineMemory) -> Self {
        Self { lines, ..self }
    }

    /// The bound of a line.
    pub fn lines(&self) -> LineMemory {
        self.lines
    }

    /// No cache: token ids are computed in every run, and documents are unpacked into a temporary file.
    pub fn disabled() -> Self {
        Self { folder: None, lines: LineMemory::UNBOUNDED }
    }

    /// The folder, if the cache is enabled.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The first file in the cache whose name begins with `prefix`.
    pub(super) fn find(&self, prefix: &str) -> Option<PathBuf> {
        let entries = fs::read_dir(self.folder.as_ref()?).ok()?.flatten();
        let found = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
        found.map(|entry| entry.path()).min()
    }

    /// The ids of a text from the cache, else from `tokenize`, whose result is then written to the cache.
    pub(super) fn token_ids(
        &self,
        tokenizer_sha256: &str,
        text_sha256: &str,
        events: &dyn Events,
        tokenize: impl FnOnce() -> anyhow::Result<Vec<u32>>,
    ) -> anyhow::Result<Vec<u32>> {
        let Some(path) = self.tokens_place(tokenizer_sha256, text_sha256) else {
            return tokenize();
        };
        if let Some(ids) = read_tokens(&path) {
            events.detail(format!(
                "tokens from the cache: {} ids in `{}`",
                ids.len(),
                path.display()
            ));
            return Ok(ids);
        }
        let ids = tokenize()?;
        if let Err(error) = write_tokens(&path, &ids) {
            events.warn(format!(
                "cannot keep token ids in `{}`: {error}; they are computed again next time",
                path.display()
            ));
        }
        Ok(ids)
    }

    /// Tells if the cache has a file of the ids, of the size that it states. Its checksum is not compared: that reads the whole file.
    pub(super) fn has_token_ids(&self, tokenizer_sha256: &str, text_sha256: &str) -> bool {
        self.tokens_place(tokenizer_sha256, text_sha256)
            .is_some_and(|path| open_tokens(&path).is_some())
    }

    fn tokens_place(&self, tokenizer_sha256: &str, text_sha256: &str) -> Option<PathBuf> {
        let key = short(&digest::of_bytes(format!("{tokenizer_sha256}\n{text_sha256}").as_bytes()));
        Some(self.folder.as_ref()?.join(format!("tokens-{key}.bin")))
    }
}

/// The part of a hash that names a file.
pub(super) fn short(hex: &str) -> String {
    hex.chars().take(32).collect()
}

/// Opens a file of token ids. Returns the file, read up to the end of its header, the number of ids and the checksum; `None` if the file
/// is absent or truncated.
fn open_tokens(path: &Path) -> Option<(File, usize, [u8; 32])> {
    let mut file = File::open(path).ok()?;
    let mut header = [0u8; TOKENS_HEADER];
    file.read_exact(&mut header).ok()?;
    let (magic, rest) = header.split_first_chunk::<8>()?;
    let (count, checksum) = rest.split_first_chunk::<8>()?;
    let count = u64::from_le_bytes(*count);
    // Checked before allocating: a damaged count must not ask for the whole memory.
    let bytes = count.checked_mul(4)?.checked_add(TOKENS_HEADER as u64)?;
    if magic != TOKENS_MAGIC || file.metadata().ok()?.len() != bytes {
        return None;
    }
    Some((file, usize::try_from(count).ok()?, *checksum.first_chunk()?))
}

/// Reads a file of token ids. `None` if it is absent, truncated, or does not match its checksum.
fn read_tokens(path: &Path) -> Option<Vec<u32>> {
    let (mut file, count, checksum) = open_tokens(path)?;
    let (mut ids, mut hasher) = (Vec::with_capacity(count), Sha256::new());
    let mut bytes = vec![0; 4 * CHUNK.min(count)];
    while ids.len() < count {
        bytes.truncate(4 * (count - ids.len()));
        file.read_exact(&mut bytes).ok()?;
        hasher.update(&bytes);
        let words = bytes.as_chunks::<4>().0;
        ids.extend(words.iter().map(|word| u32::from_le_bytes(*word)));
    }
    (hasher.finalize()[..] == checksum).then_some(ids)
}

fn write_tokens(path: &Path, ids: &[u32]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut staged = Staged::in_folder(folder, "tokens-")?;
    let mut file = staged.file();
    file.write_all(TOKENS_MAGIC)?;
    file.write_all(&(ids.len() as u64).to_le_bytes())?;
    let mut hasher = Sha256::new();
    for chunk in ids.chunks(CHUNK) {
        hasher.update(digest::little_endian(chunk));
    }
    file.write_all(&hasher.finalize())?;
    for chunk in ids.chunks(CHUNK) {
        file.write_all(&digest::little_endian(chunk))?;
    }
    staged.commit(path).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::RecordedEvents;

    #[test]
    fn token_ids_are_computed_once_and_then_read() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = TextCache::open(Some(folder.path().join("new")));
        let events = RecordedEvents::default();
        let first = cache
            .token_ids("tokenizer", "text", &events, || Ok(vec![1, 2, 70_000]))
            .expect("tokenize");
        let again = cache
            .token_ids("tokenizer", "text", &events, || panic!("must not tokenize again"))
            .expect("read");
        assert_eq!(first, again);
        assert_eq!(events.count("tokens from the cache"), 1);
        let other =
            cache.token_ids("another tokenizer", "text", &events, || Ok(vec![])).expect("tokenize");
        assert!(other.is_empty());
        let files: Vec<_> = fs::read_dir(folder.path().join("new")).expect("list").collect();
        assert_eq!(files.len(), 2, "no partial file stays");
    }

    #[test]
    fn a_damaged_file_of_token_ids_is_written_anew() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = TextCache::open(Some(folder.path().to_path_buf()));
        let events = RecordedEvents::default();
        cache.token_ids("a", "b", &events, || Ok(vec![5; 9])).expect("tokenize");
        let path =
            fs::read_dir(folder.path()).expect("list").next().expect("one").expect("entry").path();
        let good = fs::read(&path).expect("read");
        let mut flipped = good.clone();
        *flipped.last_mut().expect("not empty") ^= 1;
        let mut huge_count = good.clone();
        huge_count[8..16].fill(0xff);
        for damaged in [&good[..20], &good[..good.len() - 1], &flipped[..], &huge_count[..], b""] {
            fs::write(&path, damaged).expect("write");
            let ids = cache.token_ids("a", "b", &events, || Ok(vec![5; 9])).expect("tokenize");
            assert_eq!(ids, vec![5; 9]);
            assert_eq!(fs::read(&path).expect("read"), good);
        }
        assert_eq!(events.count("tokens from the cache"), 0);
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_only_a_warning() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let blocked = folder.path().join("file");
        fs::write(&blocked, "not a folder").expect("write");
        let events = RecordedEvents::default();
        let ids = TextCache::open(Some(blocked))
            .token_ids("a", "b", &events, || Ok(vec![1]))
            .expect("tokenize");
        assert_eq!(ids, [1]);
        assert_eq!(events.count("cannot keep token ids"), 1);
        assert_eq!(TextCache::disabled().folder(), None);
    }
}
