//! Results of the reference, as stored in `goldens/<folder>/<name>.json` and the tensors beside it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use prune::settings::{self, CalibrationSettings, ComputeDtype, EvalSides, SparsitySettings};
use safetensors::SafeTensors;
use serde::Deserialize;

/// The flags of one run of the original.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Settings {
    pub(super) model: String,
    pub(super) train: String,
    pub(super) test: String,
    pub(super) method: String,
    pub(super) sparsity_ratio: f64,
    pub(super) sparsity_type: String,
    #[serde(default)]
    pub(super) variant: bool,
    /// The weights that compete, in goldens of RIA: `whole matrix`, `per output row` or `group`.
    #[serde(default)]
    pub(super) threshold: String,
    pub(super) nsamples: usize,
    pub(super) seqlen: usize,
    pub(super) seed: u64,
    pub(super) dtype: String,
}

/// One matrix.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Linear {
    pub(super) shape: [usize; 2],
    pub(super) pruned: u64,
    pub(super) mask_sha256: String,
    /// Decisions whose two scores differ by less than 1e-5 relatively, where recorded.
    #[serde(default)]
    pub(super) near_ties_1e_5: u64,
}

/// One run.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Golden {
    #[serde(skip)]
    pub(super) name: String,
    pub(super) settings: Settings,
    pub(super) per_linear: BTreeMap<String, Linear>,
    /// Absent where nothing was calibrated (magnitude).
    pub(super) calibration_starts: Option<Vec<u64>>,
    pub(super) calibration_tokens_sha256_int32le: Option<String>,
    pub(super) ppl: f64,
    /// The error of the outputs, mean over the linears; in goldens of methods only.
    pub(super) mean_relative_error: Option<f64>,
    /// Packed bits by matrix, where saved.
    #[serde(skip)]
    pub(super) masks: Option<BTreeMap<String, Vec<u8>>>,
    /// Statistics of the first and the last layer by matrix, where saved.
    #[serde(skip)]
    pub(super) statistics: Option<BTreeMap<String, Vec<f32>>>,
}

impl Golden {
    /// The same run by `prune`, with `chosen` for method and pattern; its ids are kept in `cache`.
    pub(super) fn run_of(
        &self,
        chosen: SparsitySettings,
        shared: &Path,
        cache: &Path,
    ) -> Result<settings::Settings> {
        let of = &self.settings;
        let mut settings = settings::Settings::pruning(shared.join("models").join(&of.model));
        settings.model.dtype = ComputeDtype::F32;
        settings.sparsity = Some(chosen);
        settings.calibration = Some(CalibrationSettings {
            dataset: dataset(shared, &of.train)?.parse()?,
            nsamples: u32::try_from(of.nsamples)?,
            seed: of.seed,
        });
        settings.seqlen = Some(of.seqlen);
        settings.evaluation.eval = EvalSides::Pruned;
        settings.evaluation.text_cache = Some(cache.to_path_buf());
        settings.evaluation.eval_dataset = dataset(shared, &of.test)?.parse()?;
        Ok(settings)
    }

    /// Reads a run and the files beside it.
    pub(super) fn load(json: &Path) -> Result<Self> {
        let place = || json.display().to_string();
        let text = std::fs::read_to_string(json).with_context(place)?;
        let mut golden: Self = serde_json::from_str(&text).with_context(place)?;
        golden.name = json
            .file_stem()
            .and_then(|stem| stem.to_str())
            .context("a golden has a name")?
            .to_owned();
        let beside =
            |kind: &str| json.with_file_name(format!("{}.{kind}.safetensors", golden.name));
        let masks = tensors(&beside("masks"))?;
        let statistics = tensors(&beside("scaler_row"))?.map(|tensors| {
            let widened = tensors.into_iter().map(|(name, bytes)| {
                let values = bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word));
                (name, values.collect())
            });
            widened.collect()
        });
        (golden.masks, golden.statistics) = (masks, statistics);
        Ok(golden)
    }

    /// The reason to skip this run; `None` if we repeat it.
    ///
    /// Fails for an unknown method or dtype, so that no new golden is left out unnoticed.
    pub(super) fn skipped_because(&self) -> Result<Option<&'static str>> {
        Ok(match (self.settings.dtype.as_str(), self.settings.method.as_str()) {
            ("bfloat16" | "float16", _) => {
                Some("its forward pass was in half precision, ours is in f32")
            }
            ("float32", "sparsegpt") => Some("`repairs` repeats it"),
            ("float32", _) if self.name == "stories260k-float32-wanda-0.5-4of8" => Some(
                "8 does not divide 172 columns: the original zeroes the whole last group, we refuse",
            ),
            ("float32", "ria") if self.name.contains("reallocation") => {
                Some("its masks are no N:M masks; `permutation` repeats it")
            }
            ("float32", "ria") if self.name.contains("update") => {
                Some("a weight update behind RIA's mask is not built")
            }
            ("float32", "wanda" | "magnitude" | "dense" | "ria") => None,
            (dtype, method) => {
                bail!("`{}`: nobody decided about {method} in {dtype}", self.name)
            }
        })
    }
}

/// All goldens of a folder, by name.
pub(super) fn goldens(folder: &Path) -> Result<Vec<Golden>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| Golden::load(path)).collect()
}

/// The text a golden names, as the flag wants it.
pub(crate) fn dataset(shared: &Path, file_name: &str) -> Result<String> {
    let places =
        ["wikitext2", "stories"].map(|folder| shared.join("data").join(folder).join(file_name));
    let path: Option<&PathBuf> = places.iter().find(|path| path.is_file());
    let path = path.with_context(|| format!("no text `{file_name}` in `{}`", shared.display()))?;
    Ok(format!("wikitext2:{}", path.display()))
}

/// The bytes of every tensor in a file; `None` where there is no such file.
pub(super) fn tensors(path: &Path) -> Result<Option<BTreeMap<String, Vec<u8>>>> {
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = std::fs::read(path)?;
    let tensors = SafeTensors::deserialize(&bytes).with_context(|| path.display().to_string())?;
    let owned = tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec()));
    Ok(Some(owned.collect()))
}
