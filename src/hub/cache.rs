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
#[cfg(unix)]
use std::os::unix::fs::symlink;
#[cfg(windows)]
use std::os::windows::fs::symlink_file as symlink;
use std::path::{Component, Path, PathBuf};

use super::id::HubRepo;
use crate::failure::Failure;

/// The folder of a repository in the cache.
pub(super) struct RepoCache {
    folder: PathBuf,
    /// The folder of the locks.
    locks: PathBuf,
    revision: String,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, repo: &HubRepo) -> Self {
        let name = repo.repo().folder_name();
        Self {
            folder: cache.join(&name),
            locks: cache.join(".locks").join(name),
            revision: repo.revision().to_string(),
        }
    }

    /// The commit of the revision, or of its last download.
    pub(super) fn commit(&self) -> Option<String> {
        // A revision that is a commit never moves.
        if self.revision.len() == 40 && self.revision.bytes().all(|byte| byte.is_ascii_hexdigit()) {
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
        self.folder.join("snapshots").join(commit)
    }

    /// Returns whether a file of a commit is in the cache.
    pub(super) fn has(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    /// The files of a commit that are in the cache, by their paths in the repository.
    pub(super) fn files(&self, commit: &str) -> Vec<String> {
        let root = self.snapshot(commit);
        let (mut folders, mut found) = (vec![root.clone()], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                // The folders of a snapshot are no links; its files are.
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(path);
                } else if path.is_file()
                    && let Ok(Some(name)) = path.strip_prefix(&root).map(Path::to_str)
                {
                    found.push(name.replace('\\', "/"));
                }
            }
        }
        found.sort();
        found
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    pub(super) fn lock(&self, etag: &str) -> PathBuf {
        self.locks.join(format!("{etag}.lock"))
    }

    /// Links a blob under its file name in a commit.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), Failure> {
        let pointer = self.snapshot(commit).join(file);
        let is_normal = |part| matches!(part, Component::Normal(_));
        if file.is_empty() || !Path::new(file).components().all(is_normal) {
            return Err(cannot_write(&pointer)(io::ErrorKind::InvalidFilename.into()));
        }
        if pointer.is_file() {
            return Ok(());
        }
        // Leaves the file's folders, the commit and `snapshots`.
        let depth = Path::new(file).components().count() + 1;
        let up = std::iter::repeat_n("..", depth);
        let target: PathBuf = up.chain(["blobs", etag]).collect();
        replace(&pointer, |temporary| symlink(&target, temporary))
            // Without links, the blob itself gets the name, as with the Python client.
            .or_else(|_| fs::rename(self.blob(etag), &pointer))
            .map_err(cannot_write(&pointer))
    }

    /// Records the commit of the revision, unless the revision is a commit itself.
    pub(super) fn write_reference(&self, commit: &str) -> Result<(), Failure> {
        if self.commit().as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.reference();
        replace(&path, |temporary| fs::write(temporary, commit)).map_err(cannot_write(&path))
    }
}

/// Creates a file under a temporary name and renames it. So readers find the old file or the whole new file.
fn replace(path: &Path, create: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    create(&temporary)?;
    fs::rename(&temporary, path)
}

/// Returns whether a text can be the name of a commit's folder.
pub(super) fn is_plain_commit(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// The failure for a cache that cannot be written.
pub(super) fn cannot_write(path: &Path) -> impl Fn(io::Error) -> Failure {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    let cannot = format!("cannot write `{}`", path.display());
    let elsewhere = "choose another cache with --cache-dir or HF_HUB_CACHE";
    move |error| match error.kind() {
        StorageFull | QuotaExceeded | FileTooLarge => {
            Failure::new(format!("the disk is full: {cannot}"))
                .hint(format!("free space there, or {elsewhere}; the downloaded part is kept"))
        }
        _ => Failure::new(&cannot).detail(error.to_string()).hint(elsewhere),
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
        fs::create_dir_all(folder.path().join("models--a--b/blobs")).expect("writable");
        fs::write(cache.blob("e1"), "x").expect("write");
        cache.link("c0", "en/x.gz", "e1").expect("linked");
        let pointer = folder.path().join("models--a--b/snapshots/c0/en/x.gz");
        assert_eq!(fs::read_link(&pointer).expect("a link"), Path::new("../../../blobs/e1"));
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
        let repo = HubRepo::model("a/b").expect("an id").at(hash).expect("a commit");
        let cache = RepoCache::new(folder.path(), &repo);
        assert_eq!(cache.commit().as_deref(), Some(hash));
        cache.write_reference(hash).expect("nothing to do");
        assert!(!folder.path().join("models--a--b/refs").join(hash).exists());
    }

    #[test]
    fn a_full_disk_is_named_in_the_message() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let shown = cannot_write(Path::new("x"))(full).to_string();
        assert!(
            shown.starts_with("the disk is full: cannot write `x`\nhint: free space there"),
            "{shown}"
        );
    }
}
