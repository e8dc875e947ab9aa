//! Trained factors as a folder that peft loads: `adapter_config.json` and `adapter_model.safetensors`, with a card.
//!
//! Memory holds the factors of a single layer, in f32. The config is written last. peft adds s·B·A to the whole weight: it knows no mask,
//! so pruned weights of the base are not zero once peft has added the adapter. The model that `prune recover` merges keeps its zeros.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::Result;
use safetensors::Dtype;
use serde_json::json;

use super::config::{CONFIG_FILE, written_config};
use super::keys::{INSIDE, PREFIX, inside};
use super::opened::WEIGHTS_FILE;
use crate::bytes::json_file;
use crate::checkpoint::{cannot_write, encode_header, in_a_row, write_atomic, write_atomic_with};
use crate::disk;

/// The card of the adapter.
const CARD: &str = "README.md";

/// Trained factors of the matrices of a model.
#[derive(Debug, Clone)]
pub struct TrainedAdapter {
    /// The base, for `base_model_name_or_path`: an id of the hub, or an absolute path, from which peft's automatic loader reads it.
    pub base: String,
    /// Rows of A.
    pub rank: usize,
    /// s·rank.
    pub alpha: f64,
    /// The names of the trained modules inside a layer: `q_proj`.
    pub modules: Vec<String>,
    /// The base is the text model inside a model of several media.
    pub is_inside: bool,
    /// Full names of the matrices of each layer, with `[out_features, in_features]`.
    pub layers: Vec<Vec<(String, [usize; 2])>>,
}

impl TrainedAdapter {
    /// Writes the adapter into `folder`, over an adapter that is there.
    ///
    /// # Arguments
    /// * `factors`: the factors of a layer, A `[rank, in]` and B `[out, rank]` of each matrix in turn
    ///
    /// # Errors
    /// Fails when files cannot be written, and with the error of `factors`.
    pub fn write(
        &self,
        folder: &Path,
        factors: &dyn Fn(usize) -> Result<Vec<Vec<f32>>>,
    ) -> Result<()> {
        let config = folder.join(CONFIG_FILE);
        // Without its config, an adapter that is half replaced is not loaded.
        let created = std::fs::create_dir_all(folder).and_then(|()| disk::remove(&config));
        created.map_err(|error| cannot_write(folder, &error))?;
        let header = self.header();
        write_atomic_with(&folder.join(WEIGHTS_FILE), &mut |out| {
            let mut out = io::BufWriter::with_capacity(1 << 20, out);
            out.write_all(&header)?;
            for (layer, matrices) in self.layers.iter().enumerate() {
                let values = factors(layer).map_err(io::Error::other)?;
                self.check(matrices, &values)?;
                for values in values {
                    // Files are little endian, and so is every machine that this program is built for.
                    out.write_all(bytemuck::cast_slice(&values))?;
                }
            }
            out.flush()
        })?;
        write_atomic(&folder.join(CARD), self.card().as_bytes())?;
        write_atomic(&config, &json_file(&self.config())?)
    }

    /// Checks that the factors of a layer have the sizes that the header gives.
    fn check(&self, matrices: &[(String, [usize; 2])], values: &[Vec<f32>]) -> io::Result<()> {
        let sizes = matrices.iter();
        let sizes = sizes.flat_map(|(_, [out, inner])| [self.rank * inner, out * self.rank]);
        match sizes.eq(values.iter().map(Vec::len)) {
            true => Ok(()),
            false => Err(io::Error::other("factors do not have the sizes of their matrices")),
        }
    }

    fn header(&self) -> Vec<u8> {
        let factors = self.layers.iter().flatten().flat_map(|(name, [out, inner])| {
            [("lora_A", [self.rank, *inner]), ("lora_B", [*out, self.rank])].map(
                |(factor, shape)| {
                    let module = if self.is_inside { inside(name) } else { name.clone() };
                    (format!("{PREFIX}{module}.{factor}.weight"), Dtype::F32, shape.to_vec())
                },
            )
        });
        encode_header(&BTreeMap::from([("format".into(), "pt".into())]), &in_a_row(factors))
    }

    /// The card, as the hub shows it.
    fn card(&self) -> String {
        // A folder of this machine is no base that the hub knows.
        let is_id = self.base.split('/').count() == 2 && !self.base.starts_with('/');
        let base = match is_id {
            true => format!("base_model: {}\n", json!(self.base)),
            false => String::new(),
        };
        format!(
            "---\n{base}library_name: peft\ntags:\n- prune\n- recovered\n- lora\n---\n\n# Low-rank factors for a pruned model\n\n\
             `prune recover` trained these factors under the mask of the pruned weights: rank {}, alpha {}, {}. Load them with peft on \
             the pruned model. peft adds them to the whole weight, so pruned weights are no longer zero then. The model that \
             `prune recover` merges keeps its zeros.\n",
            self.rank,
            self.alpha,
            self.modules.join(", ")
        )
    }

    fn config(&self) -> serde_json::Value {
        // Parts for other media may have modules of the same names, and a list would add factors to them.
        let targets = match self.is_inside {
            true => json!(format!("{}.*\\.({})", regex::escape(INSIDE), self.modules.join("|"))),
            false => json!(self.modules),
        };
        written_config(Some(&self.base), self.rank, json!(self.alpha), targets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::Adapter;

    #[test]
    fn our_reader_finds_the_factors_that_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let name = |layer: usize, module: &str| format!("model.layers.{layer}.self_attn.{module}");
        let adapter = TrainedAdapter {
            base: "pruned".to_string(),
            rank: 2,
            alpha: 8.0,
            modules: vec!["q_proj".to_string(), "k_proj".to_string()],
            is_inside: false,
            layers: (0..3)
                .map(|layer| vec![(name(layer, "q_proj"), [4, 3]), (name(layer, "k_proj"), [5, 3])])
                .collect(),
        };
        let factors = |layer: usize| {
            let wave = |count: usize, pace: usize| -> Vec<f32> {
                (0..count).map(|at| ((at * pace + layer) as f32).sin()).collect()
            };
            Ok(vec![wave(6, 3), wave(8, 5), wave(6, 7), wave(10, 11)])
        };
        let place = folder.path().join("adapter");
        for _ in 0..2 {
            adapter.write(&place, &factors).unwrap();
        }
        let read = Adapter::open(&place).unwrap();
        assert_eq!(read.base_model_name(), Some("pruned"));
        assert_eq!(read.changed().count(), 6);
        for layer in 0..3 {
            let written = factors(layer).unwrap();
            for (at, module) in ["q_proj", "k_proj"].into_iter().enumerate() {
                let tensor = format!("{}.weight", name(layer, module));
                let found = read.factors(&tensor).unwrap().unwrap();
                assert_eq!((found.rank, found.scale), (2, 4.0));
                assert_eq!(found.a, written[2 * at], "{tensor}");
                assert_eq!(found.b, written[2 * at + 1], "{tensor}");
            }
        }
        let card = std::fs::read_to_string(place.join(CARD)).unwrap();
        assert!(card.contains("rank 2, alpha 8, q_proj, k_proj") && !card.contains("base_model"));
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 3);
        let inside = TrainedAdapter { is_inside: true, ..adapter.clone() };
        inside.write(&place, &factors).unwrap();
        let changed = |adapter: &Adapter| adapter.changed().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(changed(&Adapter::open(&place).unwrap()), changed(&read));
        let config = std::fs::read_to_string(place.join(CONFIG_FILE)).unwrap();
        assert!(config.contains(r"model\\.language_model\\..*\\.(q_proj|k_proj)"), "{config}");
        let short = |layer| factors(layer).map(|values| values[1..].to_vec());
        assert!(adapter.write(&place, &short).is_err());
    }
}
