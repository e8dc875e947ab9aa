//! The files of a model's repository, in an order in which nothing large is downloaded in vain.
//!
//! One request lists the files at a commit; the list alone refuses a repository without safetensors. Then `config.json` is downloaded
//! and checked, then the other small files, then the weights: `model.safetensors`, or the shards of the index. Offline, the same
//! files are found in the cache.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use serde::Deserialize;

use super::cache::RepoCache;
use super::id::HubRepo;
use super::listing::{Listing, listing};
use super::transfer::Transfer;
use super::{Hub, ModelFiles, Snapshot};
use crate::bytes::{ByteSize, read_whole};
use crate::failure::Failure;
use crate::run::{Events, Meter};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";
/// The largest index that is read; the reader of folders has the same limit.
const LARGEST_INDEX: ByteSize = ByteSize(64 << 20);

/// The part of the index that names the shards.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: std::collections::BTreeMap<String, String>,
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
        let cache = RepoCache::new(self.cache(), repo);
        if self.client.settings().is_offline {
            return self.cached_model(repo, &cache);
        }
        self.warn_of_open_token(events);
        let list = self
            .client
            .with_retries(events, || listing(&self.client, repo))
            .map_err(|error| self.or_offline(error, repo, &cache))?;
        refuse_other_repositories(repo, &list)?;
        let transfer = self.transfer(repo, &cache, events);
        if !list.files.contains_key(TOKENIZER) {
            // The user should know before gigabytes are downloaded. Runs without texts need no tokenizer.
            events.note(format!(
                "the model `{}` has no {TOKENIZER}: it cannot be calibrated or evaluated with its own",
                repo.id()
            ));
        }
        self.fetch_config(&transfer, &list, files)?;
        let is_small = |name: &str| {
            name != CONFIG
                && !name.contains(['/', '\\'])
                && !name.ends_with(".safetensors")
                && files.wants(name)
        };
        for name in list.files.keys().filter(|name| is_small(name)) {
            transfer.ensure(&list.commit, name, None)?;
        }
        let weights = self.fetch_index(&transfer, &list)?;
        for shard in &weights {
            if !list.files.contains_key(shard) {
                return Err(Failure::new(format!(
                    "the model `{}` is incomplete: `{INDEX}` names `{shard}`, which is not there",
                    repo.id()
                ))
                .hint("use another --revision")
                .into());
            }
        }
        let missing: Vec<&String> = weights
            .iter()
            .filter(|name| !cache.has(&list.commit, name))
            .collect();
        if !missing.is_empty() {
            let sizes = missing
                .iter()
                .map(|name| list.files.get(*name).copied().flatten());
            let total = sizes.collect::<Option<Vec<u64>>>().unwrap_or_default();
            // The hub's numbers may be anything.
            let total = total.into_iter().fold(0, u64::saturating_add);
            let mut meter = Meter::start(events, format!("download {}", repo.id()), total);
            for name in missing {
                transfer.ensure(&list.commit, name, Some(&mut meter))?;
            }
            meter.finish();
        }
        cache.write_reference(&list.commit)?;
        Ok(Snapshot {
            folder: cache.snapshot(&list.commit),
            commit: list.commit,
        })
    }

    /// Downloads `config.json` and checks it.
    pub(super) fn fetch_config(
        &self,
        transfer: &Transfer<'_>,
        list: &Listing,
        files: &dyn ModelFiles,
    ) -> Result<()> {
        transfer.ensure(&list.commit, CONFIG, None)?;
        files.check_config(&transfer.cache.snapshot(&list.commit))
    }

    /// Downloads the index of the weights, if there is one, and returns the names of the weight files in order.
    pub(super) fn fetch_index(
        &self,
        transfer: &Transfer<'_>,
        list: &Listing,
    ) -> Result<Vec<String>> {
        if !list.files.contains_key(INDEX) {
            return Ok(vec![SINGLE.to_string()]);
        }
        transfer.ensure(&list.commit, INDEX, None)?;
        shards(transfer.repo, &transfer.cache.snapshot(&list.commit))
    }

    /// Downloads of a repository into its cache.
    pub(super) fn transfer<'a>(
        &'a self,
        repo: &'a HubRepo,
        cache: &'a RepoCache,
        events: &'a dyn Events,
    ) -> Transfer<'a> {
        Transfer {
            client: &self.client,
            repo,
            cache,
            events,
        }
    }

    /// The model in the cache.
    pub(super) fn cached_model(&self, repo: &HubRepo, cache: &RepoCache) -> Result<Snapshot> {
        let commit = cache.commit().ok_or_else(|| self.not_cached(repo, None))?;
        let folder = cache.snapshot(&commit);
        let missing = |name: &str| !cache.has(&commit, name);
        if missing(CONFIG) {
            return Err(self.not_cached(repo, Some(CONFIG)).into());
        }
        let weights = if missing(INDEX) {
            vec![SINGLE.to_string()]
        } else {
            shards(repo, &folder)?
        };
        if let Some(name) = weights.iter().find(|name| missing(name)) {
            return Err(self.not_cached(repo, Some(name)).into());
        }
        Ok(Snapshot { folder, commit })
    }

    /// The failure for a file that is not in the cache while offline.
    pub(super) fn not_cached(&self, repo: &HubRepo, file: Option<&str>) -> Failure {
        let (noun, id, revision) = (repo.noun(), repo.id(), repo.revision());
        let message = match file {
            None => format!("the {noun} `{id}` (revision `{revision}`) is not in the cache"),
            Some(file) => {
                format!("`{file}` of the {noun} `{id}` (revision `{revision}`) is not in the cache")
            }
        };
        Failure::new(format!("{message}, and HF_HUB_OFFLINE forbids to download it"))
            .detail(format!("the cache is `{}`", self.cache().display()))
            .hint(match noun {
                "model" => "run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or \
                            give a local folder to --model",
                _ => "run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give \
                      the text's path",
            })
    }

    /// Adds to an error that the cache holds the model, if it does.
    fn or_offline(&self, error: anyhow::Error, repo: &HubRepo, cache: &RepoCache) -> anyhow::Error {
        match (error.downcast::<Failure>(), self.cached_model(repo, cache)) {
            (Ok(failure), Ok(snapshot)) => failure
                .detail(format!(
                    "the cache holds it at commit {}: HF_HUB_OFFLINE=1 uses that",
                    snapshot.commit
                ))
                .into(),
            (Ok(failure), Err(_)) => failure.into(),
            (Err(error), _) => error,
        }
    }

    pub(super) fn warn_of_open_token(&self, events: &dyn Events) {
        if let Some(warning) = self.client.settings().unencrypted_token() {
            events.warn(warning);
        }
    }
}

/// The shards that the index in `folder` names, in order.
fn shards(repo: &HubRepo, folder: &Path) -> Result<Vec<String>> {
    let path = folder.join(INDEX);
    let unusable = |why: String| {
        Failure::new(format!(
            "`{INDEX}` of the model `{}` is not usable",
            repo.id()
        ))
        .detail(format!("`{}`: {why}", path.display()))
        .hint("remove that file to download it again, or use another --revision")
    };
    let text = read_whole(&path, LARGEST_INDEX).map_err(|error| unusable(error.to_string()))?;
    let index: ShardIndex =
        serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    // The names become paths.
    let is_plain = |name: &String| {
        name.ends_with(".safetensors") && !name.starts_with('.') && !name.contains(['/', '\\', ':'])
    };
    match shards.iter().find(|name| !is_plain(name)) {
        Some(odd) => Err(unusable(format!("it names `{odd}`")).into()),
        None if shards.is_empty() => Err(unusable("it names no file".to_string()).into()),
        None => Ok(shards.into_iter().collect()),
    }
}

/// Refuses a repository whose list of files shows no model in safetensors.
pub(super) fn refuse_other_repositories(repo: &HubRepo, list: &Listing) -> Result<(), Failure> {
    let id = repo.id();
    let has = |name: &str| list.files.contains_key(name);
    let with = |endings: &[&str]| {
        let mut names = list.files.keys();
        names.find(|name| endings.iter().any(|ending| name.ends_with(ending)))
    };
    if has(CONFIG) && (has(INDEX) || has(SINGLE)) {
        return Ok(());
    }
    if has("adapter_config.json") {
        return Err(
            Failure::new(format!("`{id}` is an adapter, not a whole model"))
                .hint("merge it into its base model first, and prune that"),
        );
    }
    if has(INDEX) || has(SINGLE) {
        return Err(Failure::new(format!(
            "`{id}` has no config.json at revision `{}`",
            repo.revision()
        ))
        .hint("use the repository of the transformers format; its name often ends in -hf"));
    }
    if let Some(found) = with(&[".bin", ".pth", ".pt", ".ckpt"]) {
        return Err(Failure::new(format!(
            "`{id}` holds pickled weights only, and loading a pickle can run code"
        ))
        .detail(format!("found `{found}`, no `{SINGLE}`; nothing was downloaded"))
        .hint(format!(
            "use a revision or repository with safetensors, or convert it where you trust it: python -c \"from transformers \
             import AutoModelForCausalLM as M; M.from_pretrained('{id}').save_pretrained('{0}', safe_serialization=True)\" and \
             --model ./{0}",
            id.rsplit('/').next().unwrap_or(id)
        )));
    }
    if let Some(found) = with(&[".gguf"]) {
        return Err(
            Failure::new(format!("`{id}` holds GGUF weights, not safetensors"))
                .detail(format!("found `{found}`; nothing was downloaded"))
                .hint("use the repository it was converted from"),
        );
    }
    Err(Failure::new(format!(
        "`{id}` holds no model at revision `{}`",
        repo.revision()
    ))
    .detail(format!(
        "neither `{SINGLE}` nor `{INDEX}` is among its {} files",
        list.files.len()
    ))
    .hint("use the repository of the transformers format, or another --revision"))
}
