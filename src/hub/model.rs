//! The files of a model's repository, in an order in which nothing large is downloaded in vain.
//!
//! One request lists the files at a commit; the list alone refuses a repository without safetensors. Then `config.json` is downloaded
//! and checked, then further small files, then the weights: `model.safetensors`, or the shards of the index. Offline, the same files
//! are found in the cache.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use serde::Deserialize;

use super::cache::is_plain_commit;
use super::exchange::HttpRequest;
use super::http::Unanswered;
use super::id::HubRepo;
use super::refusal::not_a_hub;
use super::transfer::Transfer;
use super::{Hub, ModelFiles, Snapshot};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::input::{self, Expected};
use crate::run::{Events, Meter};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";
/// The largest index that is read; the reader of folders has the same limit.
const LARGEST_INDEX: ByteSize = ByteSize(64 << 20);
/// The longest list of files that is read; the list of a model has some kilobytes.
const LONGEST_LIST: ByteSize = ByteSize(64 << 20);

/// The part of the index that names the shards.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// The files of a repository at a commit: name → bytes, if the hub gives them.
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: BTreeMap<String, Option<u64>>,
}

/// The hub's answer to a request for the list.
#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

impl Hub {
    /// Downloads the files of a model that are not in the cache.
    ///
    /// # Errors
    /// Fails when the hub cannot be reached or refuses, when the repository holds no usable model, and offline when a file is not
    /// in the cache.
    pub fn model(
        &self,
        repo: &HubRepo,
        files: &dyn ModelFiles,
        events: &dyn Events,
    ) -> Result<Snapshot> {
        let transfer = Transfer::new(self, repo, events);
        if self.settings.offline_for(repo).is_some() {
            return Ok(transfer.cached_model()?);
        }
        let list = match transfer.list() {
            Ok(list) => list,
            Err(unanswered) => return Ok(transfer.cached_instead(unanswered)?),
        };
        let commit = &list.commit;
        let weights = transfer.weight_files(&list, files)?;
        if !list.files.contains_key(TOKENIZER) {
            // The user should know before gigabytes are downloaded. Runs without texts need no tokenizer.
            events.note(format!(
                "the model `{}` has no {TOKENIZER}: it cannot be calibrated or evaluated with its own",
                repo.id()
            ));
        }
        let is_small = |name: &&String| {
            !name.contains(['/', '\\']) && !name.ends_with(".safetensors") && files.wants(name)
        };
        for name in list.files.keys().filter(is_small) {
            transfer.ensure(commit, name, None)?;
        }
        let is_missing = |name: &&String| !transfer.cache.has(commit, name);
        let missing: Vec<&String> = weights.iter().filter(is_missing).collect();
        if !missing.is_empty() {
            let size = |name: &&String| list.files.get(*name).copied().flatten().map(ByteSize);
            let total: Option<ByteSize> = missing.iter().map(size).sum();
            let total = total.unwrap_or_default().0;
            let mut meter = Meter::start(events, format!("download {}", repo.id()), total);
            for name in missing {
                transfer.ensure(commit, name, Some(&mut meter))?;
            }
            meter.finish();
        }
        transfer.cache.write_reference(commit)?;
        Ok(transfer.snapshot(list.commit))
    }
}

impl Transfer<'_> {
    /// Requests the list of the files.
    pub(super) fn list(&self) -> Result<Listing, Unanswered> {
        self.hub.with_retries(self.events, || {
            let answer = self.hub.send(&HttpRequest {
                repo: self.repo,
                file: None,
                path: format!("/api/{}?blobs=true", self.repo.repo().api_url()),
                is_head: false,
                headers: Vec::new(),
            })?;
            let origin = answer.origin.clone();
            let text = self.hub.read(answer, LONGEST_LIST.0)?;
            let why = match serde_json::from_slice::<Info>(&text) {
                _ if text.len() as u64 == LONGEST_LIST.0 => format!("more than {LONGEST_LIST}"),
                Err(error) => error.to_string(),
                Ok(info) if is_plain_commit(&info.sha) => {
                    let files = info.siblings.into_iter();
                    return Ok(Listing {
                        commit: info.sha,
                        files: files.map(|file| (file.rfilename, file.size)).collect(),
                    });
                }
                Ok(_) => "the commit is no hash".to_string(),
            };
            Err(not_a_hub(&origin, format!("its list of files: {why}")).into())
        })
    }

    /// Downloads `config.json`, checks it, and downloads the index of the weights, if the repository has it. Returns the names of
    /// the weight files in order.
    pub(super) fn weight_files(
        &self,
        list: &Listing,
        files: &dyn ModelFiles,
    ) -> Result<Vec<String>> {
        refuse_other_repositories(self.repo, list)?;
        let folder = self.cache.snapshot(&list.commit);
        self.ensure(&list.commit, CONFIG, None)?;
        files.check_config(&folder)?;
        if !list.files.contains_key(INDEX) {
            return Ok(vec![SINGLE.to_string()]);
        }
        self.ensure(&list.commit, INDEX, None)?;
        let shards = shards(self.repo, &folder)?;
        match shards.iter().find(|shard| !list.files.contains_key(*shard)) {
            None => Ok(shards),
            Some(shard) => Err(Failure::new(format!(
                "the model `{}` is incomplete: `{INDEX}` names `{shard}`, which is not there",
                self.repo.id()
            ))
            .hint("use another --revision")
            .into()),
        }
    }

    /// The model in the cache.
    pub(super) fn cached_model(&self) -> Result<Snapshot, Failure> {
        let commit = self.cache.commit().ok_or_else(|| self.not_cached(None))?;
        let has = |name: &str| self.cache.has(&commit, name);
        let mut needed = vec![CONFIG.to_string()];
        if has(INDEX) {
            needed.extend(shards(self.repo, &self.cache.snapshot(&commit))?);
        } else {
            needed.push(SINGLE.to_string());
        }
        match needed.iter().find(|name| !has(name)) {
            Some(name) => Err(self.not_cached(Some(name))),
            None => Ok(self.snapshot(commit)),
        }
    }

    /// The model in the cache, where the hub cannot be reached: with a warning, as in the Python client. Fails with the failure of the
    /// request if a server answered, or if the cache does not hold all of the model.
    pub(super) fn cached_instead(&self, unanswered: Unanswered) -> Result<Snapshot, Failure> {
        let cached = match unanswered.is_unreachable {
            true => self.cached_model().ok(),
            false => None,
        };
        let snapshot = cached.ok_or_else(|| self.not_answered(&unanswered))?;
        self.warn_of_cache(&unanswered.failure, &snapshot.commit);
        Ok(snapshot)
    }

    /// The failure of the first request for a repository.
    pub(super) fn not_answered(&self, unanswered: &Unanswered) -> Failure {
        let failure = unanswered.failure.clone();
        match unanswered.is_unreachable {
            true => self.repo.taken_for_id(failure),
            false => failure,
        }
    }

    /// Warns that the cache is used because a request was not answered.
    pub(super) fn warn_of_cache(&self, failure: &Failure, commit: &str) {
        self.events.warn(format!(
            "{}; {} is taken from the cache at commit {commit}, which may be older than the hub's (HF_HUB_OFFLINE=1 sends no request)",
            failure.message,
            self.repo.named(None)
        ));
    }

    /// The files of a commit.
    pub(super) fn snapshot(&self, commit: String) -> Snapshot {
        Snapshot { folder: self.cache.snapshot(&commit), commit }
    }

    /// The failure for a file that is not in the cache while offline.
    pub(super) fn not_cached(&self, file: Option<&str>) -> Failure {
        let instead = match self.repo.noun() {
            "model" => "a local folder to --model",
            _ => "the text's path",
        };
        let offline = self.hub.settings.offline_for(self.repo);
        let offline = offline.unwrap_or("HF_HUB_OFFLINE");
        let failure = Failure::new(format!(
            "{} (revision `{}`) is not in the cache, and {offline} forbids to download it",
            self.repo.named(file),
            self.repo.revision()
        ));
        let failure = match self.cache.commit() {
            None => self.repo.taken_for_id(failure),
            Some(_) => failure,
        };
        failure.detail(format!("the cache is `{}`", self.hub.settings.cache.display()))
        .hint(format!(
            "run once without {offline} where there is a network, name the right cache with --cache-dir, or give {instead}"
        ))
    }
}

/// The shards that the index in `folder` names, in order.
fn shards(repo: &HubRepo, folder: &Path) -> Result<Vec<String>, Failure> {
    let path = folder.join(INDEX);
    let unusable = |why: String| {
        let named = repo.named(Some(INDEX));
        Failure::new(format!("{named} is not usable"))
            .detail(format!("`{}`: {why}", path.display()))
            .hint("remove that file to download it again, or use another --revision")
    };
    let text = input::read(&path, LARGEST_INDEX, Expected::Json)
        .map_err(|error| unusable(error.to_string()))?;
    let index: ShardIndex =
        serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    // The names become paths.
    let is_plain = |name: &String| {
        name.ends_with(".safetensors") && !name.starts_with('.') && !name.contains(['/', '\\', ':'])
    };
    match shards.iter().find(|name| !is_plain(name)) {
        Some(odd) => Err(unusable(format!("it names `{odd}`"))),
        None if shards.is_empty() => Err(unusable("it names no file".to_string())),
        None => Ok(shards.into_iter().collect()),
    }
}

/// Refuses a repository whose list of files shows no model in safetensors.
fn refuse_other_repositories(repo: &HubRepo, list: &Listing) -> Result<(), Failure> {
    let (id, revision) = (repo.id(), repo.revision());
    let has = |name: &str| list.files.contains_key(name);
    let find = |endings: &[&str]| {
        let ends = |name: &&String| endings.iter().any(|ending| name.ends_with(ending));
        list.files.keys().find(ends)
    };
    let has_weights = has(INDEX) || has(SINGLE);
    if has(CONFIG) && has_weights {
        return Ok(());
    }
    Err(if has("adapter_config.json") {
        Failure::new(format!("`{id}` is an adapter, not a whole model"))
            .hint("merge it into its base model first, and prune that")
    } else if has_weights {
        Failure::new(format!("`{id}` has no config.json at revision `{revision}`"))
            .hint("use the repository of the transformers format; its name often ends in -hf")
    } else if let Some(found) = find(&[".bin", ".pth", ".pt", ".ckpt"]) {
        Failure::new(format!(
            "`{id}` holds pickled weights only, and loading a pickle can run code"
        ))
        .detail(format!("found `{found}`, no `{SINGLE}`; nothing was downloaded"))
        .hint(format!(
            "use a revision or repository with safetensors, or convert it where you trust it: python -c \"from transformers \
             import AutoModelForCausalLM as M; M.from_pretrained('{id}').save_pretrained('{0}', safe_serialization=True)\" and \
             --model ./{0}",
            id.rsplit('/').next().unwrap_or(id)
        ))
    } else if let Some(found) = find(&[".gguf"]) {
        Failure::new(format!("`{id}` holds GGUF weights, not safetensors"))
            .detail(format!("found `{found}`; nothing was downloaded"))
            .hint("use the repository it was converted from")
    } else {
        Failure::new(format!("`{id}` holds no model at revision `{revision}`"))
            .detail(format!(
                "neither `{SINGLE}` nor `{INDEX}` is among its {} files",
                list.files.len()
            ))
            .hint("use the repository of the transformers format, or another --revision")
    })
}
