//! [`RandomCheckpoint`]: a model of any shape with random weights, in the layout of transformers.
//!
//! It serves speed, memory and format tests at real sizes without a download: a 70B checkpoint is written with the memory of a few
//! chunks, as fast as the disk takes it. The weights have the scale of a fresh model (deviation 0.02; the two matrices that
//! write to the residual stream divided by √(2·layers), GPT-2's rule), so activations stay finite through 80 layers.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::layout::{self, RandomTensor};
use super::noise::Noise;
use super::tokenizer::TokenizerFiles;
use crate::bytes::ByteSize;
use crate::checkpoint::{
    CHUNK_BYTES, INDEX_FILE, SINGLE_FILE, encode_header, in_a_row, partial_of, sync_folder,
    write_atomic,
};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::model::ModelConfig;
use crate::model::family::{FAMILIES, Family};
use crate::run::{Events, Meter};

/// The version of transformers whose config.json is imitated.
const TRANSFORMERS_VERSION: &str = "4.46.3";

/// A thread's share of a chunk, in bytes: a multiple of every element's size.
const SHARE_BYTES: usize = 128 << 10;

/// The shape of a random model; fields are named as in config.json. The default is a Llama of a few hundred kilobytes.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomCheckpoint {
    /// The family. Its record says which tensors the checkpoint has.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head; `None` is hidden_size / num_attention_heads.
    pub head_dim: Option<usize>,
    /// Rows of the embedding; at least 260 with the built-in tokenizer.
    pub vocab_size: usize,
    /// The longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// `rope_scaling`, written unchanged.
    pub rope_scaling: Option<Value>,
    /// Further keys of config.json, written unchanged.
    pub settings: Map<String, Value>,
    /// True if the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Biases on q, k, v and o, if the family can have them.
    pub attention_bias: bool,
    /// Biases on gate, up and down, if the family can have them.
    pub mlp_bias: bool,
    /// The dtype of every tensor.
    pub dtype: StoredDtype,
    /// The most bytes of tensors in a file. A larger tensor has a file of its own.
    pub max_shard: ByteSize,
    /// The seed. The same seed and shape give the same bytes on any number of threads.
    pub seed: u64,
    /// The origin of the tokenizer: a folder, or a `tokenizer.json` with its `tokenizer_config.json`. `None`: one token per byte.
    pub tokenizer: Option<PathBuf>,
}

impl Default for RandomCheckpoint {
    fn default() -> Self {
        Self {
            family: &FAMILIES[0],
            hidden_size: 64,
            intermediate_size: 176,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: None,
            vocab_size: 320,
            max_position_embeddings: 512,
            rope_theta: 10_000.0,
            rope_scaling: None,
            settings: Map::new(),
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            dtype: StoredDtype::F32,
            // The default of transformers.
            max_shard: ByteSize(5_000_000_000),
            seed: 0,
            tokenizer: None,
        }
    }
}

impl RandomCheckpoint {
    /// The default shape in the family `model_type`.
    pub fn of_family(model_type: &str) -> Result<Self, Failure> {
        let mut families = FAMILIES.iter();
        let family = families
            .find(|family| family.model_type == model_type)
            .ok_or_else(|| Failure::usage(format!("no family is called `{model_type}`")))?;
        Ok(Self { family, ..Self::default() })
    }

    /// Writes the checkpoint into `target`, which must be empty or not exist. `config.json`, written last, marks it as finished.
    ///
    /// # Errors
    /// Fails when the shape is impossible, `target` is not empty, the tokenizer cannot be read or does not fit the vocabulary, or a file
    /// cannot be written.
    pub fn write(&self, target: &Path, events: &dyn Events) -> anyhow::Result<()> {
        let config = ModelConfig::from_json(&self.config(None))?;
        let tokenizer = match &self.tokenizer {
            Some(path) => TokenizerFiles::read(path, self.vocab_size)?,
            None => TokenizerFiles::of_bytes(self.vocab_size, self.max_position_embeddings)?,
        };
        fs::create_dir_all(target).map_err(|error| cannot_write(target, &error))?;
        let mut there = fs::read_dir(target).map_err(|error| cannot_write(target, &error))?;
        if there.next().is_some() {
            return Err(Failure::new(format!("the folder `{}` is not empty", target.display()))
                .hint("choose another folder")
                .into());
        }

        let tensors = layout::tensors(&config, self.dtype)?;
        let total: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
        let shards = layout::shards(&tensors, self.max_shard);
        let mut meter = Meter::start(events, "generate", total);
        let mut weight_map = BTreeMap::new();
        for (index, shard) in shards.iter().enumerate() {
            let file_name = shard_name(index, shards.len());
            let path = target.join(&file_name);
            if let Err(error) = self.write_shard(&path, shard, &mut meter) {
                // A full disk must not stay full. The folder was empty, so every file in it is ours.
                for earlier in 0..=index {
                    let path = target.join(shard_name(earlier, shards.len()));
                    let _ = fs::remove_file(partial_of(&path));
                    let _ = fs::remove_file(path);
                }
                return Err(cannot_write(&path, &error)
                    .detail(format!("the checkpoint needs {}", ByteSize(total)))
                    .into());
            }
            let names = shard.iter().map(|tensor| tensor.name.as_str());
            weight_map.extend(names.map(|name| (name, file_name.clone())));
        }
        meter.finish();
        sync_folder(target)?;

        if shards.len() > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            write_json(target, INDEX_FILE, &index)?;
        }
        write_atomic(&target.join("tokenizer.json"), &tokenizer.json)?;
        if let Some(config) = &tokenizer.config {
            write_atomic(&target.join("tokenizer_config.json"), config)?;
        }
        let TokenizerFiles { bos, eos, pad, .. } = tokenizer;
        let generation = json!({
            "_from_model_config": true, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad,
            "transformers_version": TRANSFORMERS_VERSION
        });
        write_json(target, "generation_config.json", &generation)?;
        let mut config = self.config(Some(config.head_dim));
        for (key, id) in [("bos", bos), ("eos", eos), ("pad", pad)] {
            config[format!("{key}_token_id")] = json!(id);
        }
        write_json(target, "config.json", &config)
    }

    fn write_shard(
        &self,
        path: &Path,
        tensors: &[RandomTensor],
        meter: &mut Meter<'_>,
    ) -> io::Result<()> {
        let dtype = self.dtype.in_file();
        let infos = tensors.iter().map(|of| (of.name.clone(), dtype, of.shape.clone()));
        let infos = in_a_row(infos);
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);

        let partial = partial_of(path);
        let mut file = File::create(&partial)?;
        // A chunk is written while the next chunk is generated.
        let (mut ready, mut next) = (encode_header(&metadata, &infos), Vec::new());
        for tensor in tensors {
            let mut done = 0;
            while done < tensor.bytes {
                let length = (tensor.bytes - done).min(CHUNK_BYTES as u64);
                next.resize(length as usize, 0);
                let (written, ()) =
                    rayon::join(|| file.write_all(&ready), || self.fill(tensor, done, &mut next));
                written?;
                std::mem::swap(&mut ready, &mut next);
                done += length;
                meter.add(length);
            }
        }
        file.write_all(&ready)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&partial, path)
    }

    fn fill(&self, tensor: &RandomTensor, start: u64, bytes: &mut [u8]) {
        let noise = Noise::new(self.seed, tensor.number);
        bytes.par_chunks_mut(SHARE_BYTES).enumerate().for_each(|(share, bytes)| {
            let first = (start + (share * SHARE_BYTES) as u64) / self.dtype.bytes() as u64;
            self.fill_share(tensor, noise, first, bytes);
        });
    }

    fn fill_share(&self, tensor: &RandomTensor, noise: Noise, first: u64, bytes: &mut [u8]) {
        // Blocks let the conversions use vector instructions.
        const BLOCK: usize = 256;
        let each = self.dtype.bytes();
        let (mut values, mut halves) = ([0f32; BLOCK], [f16::ZERO; BLOCK]);
        let mut index = first;
        for block in bytes.chunks_mut(BLOCK * each) {
            let count = block.len() / each;
            for (value, at) in values[..count].iter_mut().zip(index..) {
                *value = noise.normal(at) * tensor.deviation + tensor.mean;
            }
            index += count as u64;
            match self.dtype {
                StoredDtype::F32 => {
                    for (out, value) in block.chunks_exact_mut(4).zip(&values) {
                        out.copy_from_slice(&value.to_le_bytes());
                    }
                }
                StoredDtype::F16 => {
                    halves[..count].convert_from_f32_slice(&values[..count]);
                    for (out, half) in block.chunks_exact_mut(2).zip(&halves) {
                        out.copy_from_slice(&half.to_le_bytes());
                    }
                }
                StoredDtype::Bf16 => {
                    for (out, value) in block.chunks_exact_mut(2).zip(&values) {
                        out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
                    }
                }
            }
        }
    }

    /// `config.json` without the ids of special tokens, which the tokenizer gives.
    fn config(&self, head_dim: Option<usize>) -> Value {
        // A family may have a width of heads for a file that gives none.
        let by_default = self
            .family
            .defaults
            .head_dim
            .map(|_| self.hidden_size / self.num_attention_heads.max(1));
        let mut config = json!({
            "architectures": [self.family.architectures[0]],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "bos_token_id": null,
            "eos_token_id": null,
            "head_dim": head_dim.or(self.head_dim).or(by_default),
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": self.mlp_bias,
            "model_type": self.family.model_type,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": null,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": self.rope_scaling,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.dtype.torch_name(),
            "transformers_version": TRANSFORMERS_VERSION,
            "use_cache": true,
            "vocab_size": self.vocab_size
        });
        let activation = self.family.activation;
        config[activation.key] = activation.default.into();
        for (key, value) in &self.settings {
            config[key] = value.clone();
        }
        config
    }
}

/// The name of the file number `index` of `count`, as in transformers.
fn shard_name(index: usize, count: usize) -> String {
    match count {
        1 => SINGLE_FILE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

fn write_json(target: &Path, name: &str, value: &Value) -> anyhow::Result<()> {
    write_atomic(&target.join(name), format!("{value:#}\n").as_bytes())
}

fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot write `{}`", path.display())).detail(error.to_string())
}
