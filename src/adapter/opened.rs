//! [`Adapter`]: an opened adapter of peft, every key understood and every shape checked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

use super::change::TensorChange;
use super::config::{AdapterConfig, CONFIG_FILE};
use super::keys::{self, ChangePart};
use super::parts::Parts;
use super::stored::Stored;
use crate::checkpoint::{
    CONFIG_FILE as MODEL_CONFIG, Checkpoint, TensorEntry, WeightSource, is_of_text_model,
    not_a_model,
};
use crate::failure::Failure;
use crate::linalg::LowRank;

/// The weights of an adapter.
pub(super) const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// The weights of an adapter as a pickle, which is never opened: loading a pickle can run code.
const PICKLE_FILE: &str = "adapter_model.bin";

/// A head that an adapter separates from the embedding.
#[derive(Debug, Clone)]
pub(super) struct OwnHead {
    /// The name of its tensor.
    pub(super) head: String,
    /// The name of the base's tensor that it begins as.
    pub(super) embedding: String,
}

/// A change of a base model: an adapter's folder.
#[derive(Debug, Clone)]
pub struct Adapter {
    place: PathBuf,
    base_model: Option<String>,
    /// `ensure_weight_tying` of the config.
    pub(super) keeps_tie: bool,
    /// The names in its file are of the text model inside a model of several media.
    pub(super) is_inside: bool,
    /// `fan_in_fan_out` of the config.
    says_transposed: bool,
    /// Changes by the name of the base's tensor.
    pub(super) parts: BTreeMap<String, Parts>,
    /// The head that the adapter separates from the embedding of a tied base.
    pub(super) own_head: Option<OwnHead>,
}

impl Adapter {
    /// Opens a folder with `adapter_config.json` and `adapter_model.safetensors`. Reads the config and the header.
    ///
    /// # Errors
    /// Fails when a file is missing or damaged, when the config has a setting that no change of weights can follow, when a tensor of the
    /// file is not understood, and when factors do not fit one another or their rank.
    pub fn open(folder: &Path) -> Result<Self> {
        find_files(folder)?;
        let config = AdapterConfig::read(folder)?;
        let file = Arc::new(Checkpoint::open_file(folder, WEIGHTS_FILE)?);
        let mut found: BTreeMap<String, BTreeMap<ChangePart, Stored>> = BTreeMap::new();
        for entry in file.tensors() {
            let in_file =
                |failure: Failure| failure.detail(format!("it is in `{}`", file.file_of(entry)));
            let Some((tensor, part)) = keys::parse(&entry.name) else {
                return Err(in_file(Failure::new(format!(
                    "the adapter's tensor `{}` has an unknown name",
                    entry.name
                )))
                .detail("known: base_model.model.<module> with .lora_A.weight, .lora_B.weight, .weight and their relatives of peft 0.21")
                .hint("save the adapter with peft: model.save_pretrained(FOLDER)")
                .into());
            };
            if part == ChangePart::Original {
                continue;
            }
            if part.is_factor() {
                let module = tensor.rsplit_once('.').map_or(&*tensor, |(module, _)| module);
                config.check_target(module).map_err(in_file)?;
            }
            let stored = Stored::new(&file, entry)?;
            let parts = found.entry(tensor).or_default();
            if let Some(other) = parts.insert(part, stored) {
                return Err(in_file(Failure::new(format!(
                    "the adapter's tensors `{}` and `{}` have the same meaning",
                    other.key(),
                    entry.name
                )))
                .into());
            }
        }
        let mut parts = BTreeMap::new();
        for (tensor, found) in found {
            let of = Parts::new(&tensor, found, &config).map_err(|failure| {
                failure.detail(format!("the adapter is `{}`", folder.display()))
            })?;
            parts.insert(tensor, of);
        }
        if parts.is_empty() {
            return Err(Failure::new(format!(
                "the adapter `{}` holds no tensors",
                folder.display()
            ))
            .hint("download the adapter again")
            .into());
        }
        Ok(Self {
            place: folder.to_path_buf(),
            base_model: config.base_model,
            keeps_tie: config.ensure_weight_tying,
            says_transposed: config.fan_in_fan_out,
            is_inside: file.tensors().any(|entry| keys::is_inside(&entry.name)),
            parts,
            own_head: None,
        })
    }

    /// The folder in messages.
    pub(super) fn place(&self) -> &Path {
        &self.place
    }

    pub(super) fn parts(&self) -> &BTreeMap<String, Parts> {
        &self.parts
    }

    /// The base that the config names (`base_model_name_or_path`): an id of the hub, or a folder as it was during training.
    pub fn base_model_name(&self) -> Option<&str> {
        self.base_model.as_deref()
    }

    /// Checks every tensor against the base.
    ///
    /// # Errors
    /// Fails when the base does not have a tensor that the adapter changes, or has it in a different shape.
    pub fn check(&self, base: &dyn WeightSource) -> Result<()> {
        for (tensor, parts) in &self.parts {
            let here = |failure: Failure| {
                failure.detail(format!(
                    "the adapter is `{}`, the base `{}`",
                    self.place.display(),
                    base.place()
                ))
            };
            match base.entry(self.stored_in_base(tensor)) {
                Some(entry) => parts.check(entry).map_err(here)?,
                None => return Err(here(missing(tensor)).into()),
            }
        }
        Ok(())
    }

    /// The tensors of the adapted model with more rows than the base's, by name: an embedding and a head with added tokens. The adapter
    /// replaces them whole.
    pub fn grown(&self, base: &dyn WeightSource) -> BTreeMap<String, TensorEntry> {
        let parts = self.parts.iter();
        let grown = parts.filter_map(|(tensor, parts)| {
            let entry = parts.grown(tensor, base.entry(self.stored_in_base(tensor))?)?;
            Some((tensor.clone(), entry))
        });
        grown.collect()
    }

    /// Returns whether the config says that the weights of its linears are transposed. peft ignores it with a warning, and so does this
    /// program: linears are not.
    pub fn says_transposed(&self) -> bool {
        self.says_transposed
    }

    /// Names of the base's tensors that the adapter changes or replaces, sorted.
    pub fn changed(&self) -> impl Iterator<Item = &str> {
        self.parts.keys().map(String::as_str)
    }

    /// Reads the change of a tensor; `None` if the adapter does not change it.
    ///
    /// # Errors
    /// Fails when the file cannot be read, or holds a number that is not finite.
    pub fn change(&self, tensor: &str) -> Result<Option<TensorChange>> {
        let parts = self.parts.get(tensor);
        parts.map(|parts| parts.change(tensor)).transpose()
    }

    /// Reads the factors of a tensor, of an embedding transposed and in each other's place; `None` if the adapter has none for it.
    ///
    /// # Errors
    /// Fails as [`Adapter::change`] does.
    pub fn factors(&self, tensor: &str) -> Result<Option<LowRank>> {
        let parts = self.parts.get(tensor);
        let product = parts.and_then(|parts| parts.product.as_ref());
        product.map(|product| product.read()).transpose()
    }
}

/// The refusal of a change of a tensor that the base does not have.
fn missing(tensor: &str) -> Failure {
    let failure =
        Failure::new(format!("the adapter changes `{tensor}`, which the base does not have"));
    if !is_of_text_model(tensor) && tensor.starts_with("model.") {
        failure
            .detail("it is no part of a language model, and only a language model can be changed")
            .hint("merge this adapter with peft, in Python: model.merge_and_unload().save_pretrained(FOLDER)")
    } else if tensor.ends_with(".bias") {
        failure.detail("a bias cannot be merged into a layer without one")
    } else {
        failure.hint("check that the adapter was trained on this base")
    }
}

/// Checks that the two files are there, and says what is there instead.
fn find_files(folder: &Path) -> Result<(), Failure> {
    let shown = folder.display();
    if !folder.is_dir() {
        let what = match folder.exists() {
            true => "a file, not an adapter's folder",
            false => "not there",
        };
        return Err(Failure::new(format!("the adapter `{shown}` is {what}")));
    }
    let has = |name: &str| folder.join(name).is_file();
    if !has(CONFIG_FILE) {
        if let Some(failure) = not_a_model(folder) {
            return Err(failure);
        }
        let failure = Failure::new(format!("`{shown}` is not an adapter"))
            .detail(format!("`{CONFIG_FILE}` is not there"));
        return Err(match has(MODEL_CONFIG) {
            true => failure.detail(format!("it is a model: `{MODEL_CONFIG}` is there")),
            false => failure.hint("download the adapter again"),
        });
    }
    if has(WEIGHTS_FILE) {
        return Ok(());
    }
    let failure = Failure::new(format!("the adapter `{shown}` has no `{WEIGHTS_FILE}`"));
    Err(match has(PICKLE_FILE) {
        true => failure
            .detail(format!("`{PICKLE_FILE}` is a pickle, and loading a pickle can run code"))
            .hint(format!(
                "convert it where you trust it: python -c \"import torch, safetensors.torch as s; \
                 s.save_file(torch.load('{shown}/{PICKLE_FILE}', map_location='cpu', weights_only=True), '{shown}/{WEIGHTS_FILE}')\""
            )),
        false => failure
            .detail("peft writes one file; adapters in several files are not read")
            .hint("download the adapter again"),
    })
}
