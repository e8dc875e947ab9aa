//! The folder of a repository in the cache, in the layout that all clients of the hub share:
//!
//! ```text
//! models--owner--name/
//!   blobs/<etag>                     the contents
//!   refs/<revision>                  the commit of a branch or tag at the last download
//!   snapshots/<commit>/<file>        a relative link to its blob
//! ```
//!
//! A reference is written after all files of its commit. So an interrupted update leaves the old commit usable offline.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use hf_hub::{Cache, CacheRepo};

use super::id::HubRepo;
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The folder of a repository in the cache.
pub(super) struct RepoCache {
    layout: CacheRepo,
    folder: PathBuf,
    locks: PathBuf,
    revision: String,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, repo: &HubRepo) -> Self {
        let name = repo.repo().folder_name();
        Self {
            layout: Cache::new(cache.to_path_buf()).repo(repo.repo()),
            folder: cache.join(&name),
            locks: cache.join(".locks").join(name),
            revision: repo.revision().to_string(),
        }
    }

    /// The commit of the revision, or of its last download.
    pub(super) fn commit(&self) -> Option<String> {
        if is_full_hash(&self.revision) {
            return Some(self.revision.clone());
        }
        let commit = fs::read_to_string(self.reference()).ok()?;
        let commit = commit.trim();
        is_plain_commit(commit).then(|| commit.to_string())
    }

    fn reference(&self) -> PathBuf {
        self.folder.join("refs").join(&self.revision)
    }

    /// The folder of a commit's files.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// Returns whether a file of a commit is in the cache.
    pub(super) fn has(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.layout.blob_path(etag)
    }

    pub(super) fn lock(&self, etag: &str) -> PathBuf {
        self.locks.join(format!("{etag}.lock"))
    }

    /// Creates the folder of the blobs.
    pub(super) fn create(&self) -> Result<(), Failure> {
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(|error| cannot_write(&blobs, &error))
    }

    /// Links a blob under its file name in a commit.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), Failure> {
        let pointer = self.snapshot(commit).join(file);
        let cannot = |error: io::Error| cannot_write(&pointer, &error);
        let is_below = Path::new(file)
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        if !is_below || file.is_empty() {
            return Err(cannot(io::ErrorKind::InvalidFilename.into()));
        }
        if let Some(folder) = pointer.parent() {
            fs::create_dir_all(folder).map_err(cannot)?;
        }
        // Leaves the file's folders, the commit and `snapshots`.
        let depth = Path::new(file).components().count() + 1;
        let target: PathBuf = std::iter::repeat_n("..", depth)
            .chain(["blobs", etag])
            .collect();
        loop {
            if pointer.is_file() {
                return Ok(());
            }
            match symlink(&target, &pointer) {
                Ok(()) => return Ok(()),
                // Another process made the link, or an old link is broken.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if pointer.is_file() {
                        return Ok(());
                    }
                    match fs::remove_file(&pointer) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => {
                            return Err(cannot(error));
                        }
                        _ => {}
                    }
                }
                // Without links, the blob itself gets the name, as with the Python client.
                Err(_) => return fs::rename(self.blob(etag), &pointer).map_err(cannot),
            }
        }
    }

    /// Records the commit of the revision, unless the revision is a commit itself.
    pub(super) fn write_reference(&self, commit: &str) -> Result<(), Failure> {
        if self.commit().as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.reference();
        let cannot = |error: io::Error| cannot_write(&path, &error);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(cannot)?;
        }
        // The rename keeps readers from a half-written file.
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        fs::write(&temporary, commit).map_err(cannot)?;
        fs::rename(&temporary, &path).map_err(cannot)
    }
}

#[cfg(unix)]
fn symlink(target: &Path, pointer: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

#[cfg(windows)]
fn symlink(target: &Path, pointer: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, pointer)
}

/// Returns whether a text can be the name of a commit's folder.
pub(super) fn is_plain_commit(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Returns whether a revision is a commit, which never moves.
fn is_full_hash(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The failure for a cache that cannot be written.
pub(super) fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    let elsewhere = "choose another cache with --cache-dir or HF_HUB_CACHE";
    if is_full(error) {
        return Failure::new(format!(
            "the disk is full: cannot write `{}`",
            path.display()
        ))
        .hint(format!(
            "free space there, or {elsewhere}; the downloaded part is kept"
        ));
    }
    Failure::new(format!("cannot write `{}`", path.display()))
        .detail(error.to_string())
        .hint(elsewhere)
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// The failure for a write of which `missing` bytes remain.
pub(super) fn cannot_store(path: &Path, error: &io::Error, missing: Option<ByteSize>) -> Failure {
    let failure = cannot_write(path, error);
    match missing {
        Some(missing) if is_full(error) => {
            failure.detail(format!("{missing} are still to be written"))
        }
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path) -> RepoCache {
        RepoCache::new(folder, &HubRepo::model("a/b").expect("an id"))
    }

    #[cfg(unix)]
    #[test]
    fn links_are_relative_and_replace_broken_ones() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = cache(folder.path());
        cache.create().expect("writable");
        fs::write(cache.blob("e1"), "x").expect("write");
        cache.link("c0", "en/x.gz", "e1").expect("linked");
        let pointer = folder.path().join("models--a--b/snapshots/c0/en/x.gz");
        assert_eq!(
            fs::read_link(&pointer).expect("a link"),
            Path::new("../../../blobs/e1")
        );
        assert!(cache.has("c0", "en/x.gz"));
        fs::rename(cache.blob("e1"), cache.blob("e2")).expect("renamed");
        assert!(!cache.has("c0", "en/x.gz"));
        cache.link("c0", "en/x.gz", "e2").expect("linked");
        cache.link("c0", "en/x.gz", "e2").expect("linked already");
        assert_eq!(fs::read_to_string(pointer).expect("readable"), "x");
        for outside in ["../x", "/x", ""] {
            assert!(cache.link("c0", outside, "e2").is_err(), "{outside}");
        }
    }

    #[test]
    fn a_reference_gives_its_commit_and_a_commit_is_its_own() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cache = cache(folder.path());
        assert_eq!(cache.commit(), None);
        cache.write_reference("abc").expect("written");
        assert_eq!(cache.commit().as_deref(), Some("abc"));
        assert_eq!(
            fs::read_to_string(folder.path().join("models--a--b/refs/main")).expect("written"),
            "abc"
        );
        fs::write(cache.reference(), "../../..").expect("write");
        assert_eq!(cache.commit(), None);
        let hash = "0123456789abcdef0123456789abcdef01234567";
        let repo = HubRepo::model("a/b")
            .expect("an id")
            .at(hash)
            .expect("a commit");
        let cache = RepoCache::new(folder.path(), &repo);
        assert_eq!(cache.commit().as_deref(), Some(hash));
        cache.write_reference(hash).expect("nothing to do");
        assert!(!folder.path().join("models--a--b/refs").join(hash).exists());
    }

    #[test]
    fn a_full_disk_is_named_in_the_message() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let shown = cannot_store(Path::new("x"), &full, Some(ByteSize(3 << 20))).to_string();
        assert!(
            shown.starts_with(
                "the disk is full: cannot write `x`\n  3.00 MiB are still to be written"
            ),
            "{shown}"
        );
    }
}
