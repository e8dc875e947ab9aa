//! A folder for what is slow to make again: unpacked document files with their line index, and token ids.
//!
//! Several processes may share the folder: every file is written beside its place and renamed into it, and nothing in it is
//! ever changed afterwards. The cache is a convenience: a file that does not check out counts as absent, and a write that
//! fails is a warning. Deleting the folder is always safe.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use super::digest;
use crate::run::Events;

/// First bytes of a file of token ids; the digit is the layout's version.
const TOKENS_MAGIC: &[u8; 8] = b"PRNTOK1\n";
/// Magic, count (u64 LE), SHA-256 of the ids that follow as u32 LE.
const TOKENS_HEADER: usize = 8 + 8 + 32;
/// Ids read or written at once.
const CHUNK: usize = 1 << 16;

/// The folder, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextCache {
    folder: Option<PathBuf>,
}

impl TextCache {
    /// The cache in `folder`; without one, in `$PRUNE_CACHE`, else `$XDG_CACHE_HOME/prune`, else `~/.cache/prune`. Where
    /// none of these is set, the cache is disabled. Folders are created when first written to.
    pub fn open(folder: Option<PathBuf>) -> Self {
        let variable = |name: &str| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let folder = folder
            .or_else(|| variable("PRUNE_CACHE"))
            .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("prune")))
            .or_else(|| variable("HOME").map(|path| path.join(".cache").join("prune")));
        Self { folder }
    }

    /// No cache: token ids are computed every time, compressed documents are unpacked into a temporary file.
    pub fn disabled() -> Self {
        Self { folder: None }
    }

    /// Where the cache is, if it is enabled.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The place of a file in the cache.
    pub(super) fn place(&self, name: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(name))
    }

    /// A key for what is derived from a file: its resolved path, size and time of change, so that reading it is not needed.
    pub(super) fn key_of_file(path: &Path) -> io::Result<String> {
        let resolved = path.canonicalize()?;
        let metadata = resolved.metadata()?;
        let changed = metadata
            .modified()?
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let identity = format!(
            "{}\n{}\n{}",
            resolved.display(),
            metadata.len(),
            changed.as_nanos()
        );
        Ok(short(&digest::of_bytes(identity.as_bytes())))
    }

    /// The ids of a text, from the cache if they are there, else from `tokenize`, whose result is then kept.
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
            events.note(format!(
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

    /// Whether the ids of a text seem to be in the cache: their file is there and of the size it states. Its checksum is not
    /// looked at, which would read all of it.
    pub(super) fn has_token_ids(&self, tokenizer_sha256: &str, text_sha256: &str) -> bool {
        self.tokens_place(tokenizer_sha256, text_sha256)
            .is_some_and(|path| open_tokens(&path).is_some())
    }

    /// The place of the ids of a text.
    fn tokens_place(&self, tokenizer_sha256: &str, text_sha256: &str) -> Option<PathBuf> {
        let key = short(&digest::of_bytes(
            format!("{tokenizer_sha256}\n{text_sha256}").as_bytes(),
        ));
        self.place(&format!("tokens-{key}.bin"))
    }
}

/// Enough of a hash to name a file.
fn short(hex: &str) -> String {
    hex.chars().take(32).collect()
}

/// A file of token ids behind its header: the file, the number of ids, the checksum. None where it is absent or cut short.
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

/// Reads a file of token ids, [`CHUNK`] of them at a time; none where it is absent, cut short, or does not match its checksum.
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

/// Writes a file of token ids.
fn write_tokens(path: &Path, ids: &[u32]) -> io::Result<()> {
    let mut staged = Staged::beside(path)?;
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
    staged.commit(path)
}

/// A file that is being written: it gets its name by [`Staged::commit`], and is gone if that never happens.
#[derive(Debug)]
pub(super) struct Staged {
    file: File,
    path: PathBuf,
    is_committed: bool,
}

impl Staged {
    /// A new file in the folder of `target`, which is created if needed.
    pub(super) fn beside(target: &Path) -> io::Result<Self> {
        let folder = target.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let name = target
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Self::create(folder, &name)
    }

    /// A file without a future name, in the system's folder for temporary files.
    pub(super) fn temporary() -> io::Result<Self> {
        let staged = Self::create(&env::temp_dir(), "prune-text")?;
        // On Unix the open file lives on without its name, so that nothing is left behind even if we are killed; where that
        // is impossible, dropping removes it.
        let _ = fs::remove_file(&staged.path);
        Ok(staged)
    }

    /// A file with a name nobody else uses, open for reading and writing.
    fn create(folder: &Path, name: &str) -> io::Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        loop {
            let count = COUNTER.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!(".{name}.{}-{count}.partial", std::process::id()));
            match OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)
            {
                Ok(file) => {
                    return Ok(Self {
                        file,
                        path,
                        is_committed: false,
                    });
                }
                // Left behind by a process of the same id, on this or another machine: take the next name.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The open file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name, replacing what was there. Its data is on disk before its name is.
    pub(super) fn commit(&mut self, target: &Path) -> io::Result<()> {
        self.file.sync_data()?;
        fs::rename(&self.path, target)?;
        self.is_committed = true;
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::Recorded;

    #[test]
    fn token_ids_are_computed_once_and_then_read() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = TextCache::open(Some(folder.path().join("new")));
        let events = Recorded::default();
        let first = cache
            .token_ids("tokenizer", "text", &events, || Ok(vec![1, 2, 70_000]))
            .expect("tokenize");
        let again = cache
            .token_ids("tokenizer", "text", &events, || {
                panic!("must not tokenize again")
            })
            .expect("read");
        assert_eq!(first, again);
        assert_eq!(events.count("tokens from the cache"), 1);
        let other = cache
            .token_ids("another tokenizer", "text", &events, || Ok(vec![]))
            .expect("tokenize");
        assert!(other.is_empty());
        let files: Vec<_> = fs::read_dir(folder.path().join("new"))
            .expect("list")
            .collect();
        assert_eq!(files.len(), 2, "no partial file stays");
    }

    #[test]
    fn a_damaged_file_of_token_ids_is_written_anew() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = TextCache::open(Some(folder.path().to_path_buf()));
        let events = Recorded::default();
        cache
            .token_ids("a", "b", &events, || Ok(vec![5; 9]))
            .expect("tokenize");
        let path = fs::read_dir(folder.path())
            .expect("list")
            .next()
            .expect("one")
            .expect("entry")
            .path();
        let good = fs::read(&path).expect("read");
        let mut flipped = good.clone();
        *flipped.last_mut().expect("not empty") ^= 1;
        let mut huge_count = good.clone();
        huge_count[8..16].fill(0xff);
        for damaged in [
            &good[..20],
            &good[..good.len() - 1],
            &flipped[..],
            &huge_count[..],
            b"",
        ] {
            fs::write(&path, damaged).expect("write");
            let ids = cache
                .token_ids("a", "b", &events, || Ok(vec![5; 9]))
                .expect("tokenize");
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
        let events = Recorded::default();
        let ids = TextCache::open(Some(blocked))
            .token_ids("a", "b", &events, || Ok(vec![1]))
            .expect("tokenize");
        assert_eq!(ids, [1]);
        assert_eq!(events.count("cannot keep token ids"), 1);
        assert_eq!(TextCache::disabled().folder(), None);
    }
}
