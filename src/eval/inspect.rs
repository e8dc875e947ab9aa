//! The sparsity check: the content of a checkpoint on the disk, and its comparison with a dense checkpoint.
//!
//! Every tensor is read once, in the order of the files, in small pieces: no tokenizer, no forward pass, no layer in memory.
//! `checkpoint::scan_tensor` reads a tensor. This file knows the names of decoder linears and combines the results.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::Result;
use safetensors::Dtype;

use super::comparison::Against;
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, GROUP_SIZES, Scan, TensorEntry, WeightSource, scan_tensor};
use crate::model::{LinearId, ModelConfig};
use crate::run::inspection::{
    DtypeShare, GroupZeros, InspectedLayer, InspectedMatrix, Inspection, OtherTensors,
    PatternCount, Problem, SCHEMA, ShardFile, Zeros,
};
use crate::run::{Events, Meter};

/// A pattern accounts for a matrix's zeros where it explains at least this share of them: a few weights of a group may be
/// zero beyond it, because they were zero before pruning.
const ACCOUNTS_FOR: f64 = 0.95;

/// Kinds of tensors that are not decoder linears, in the order of the report.
const KINDS: [&str; 5] = ["embedding", "head", "norms", "biases", "others"];

/// A checkpoint and its tensors as they are examined.
#[derive(Clone)]
pub struct Inspected<'a> {
    /// The files.
    pub checkpoint: &'a Checkpoint,
    /// The reader of tensors: the checkpoint, or a view that reads a 4-bit checkpoint as if it were dense.
    pub source: &'a dyn WeightSource,
    /// The tensors of the reader, in the order of the files.
    pub tensors: Vec<&'a TensorEntry>,
}

impl<'a> Inspected<'a> {
    /// A checkpoint as it is.
    pub fn whole(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, source: checkpoint, tensors: checkpoint.tensors().collect() }
    }
}

/// Reads every tensor of a model, and compares it with the tensor of the same name in `dense` if given.
///
/// # Errors
/// Fails only when a file cannot be read. Everything else that is wrong with tensors is part of the result.
pub fn inspect(
    inspected: &Inspected<'_>,
    config: &ModelConfig,
    dense: Option<&Checkpoint>,
    events: &dyn Events,
) -> Result<Inspection> {
    let model = inspected.checkpoint;
    let tensors = || inspected.tensors.iter().copied();
    let places = linears(config);
    let mut found: BTreeMap<(usize, LinearId), InspectedMatrix> = BTreeMap::new();
    let mut other: Vec<OtherTensors> = KINDS.iter().map(|kind| nothing_of(kind)).collect();
    let mut against = dense.map(Against::new);
    let mut problems = Vec::new();
    let bytes = tensors().map(|entry| entry.bytes).sum();
    let mut meter = Meter::start(events, "inspect", bytes);
    for entry in tensors() {
        let place = places.get(entry.name.as_str()).copied();
        let partner = against.as_mut().and_then(|against| against.partner(entry));
        let scan = scan_tensor(inspected.source, entry, partner)?;
        if let Some(against) = &mut against {
            // Tensors of uncounted types hold no weights that could be kept: they are compared as bytes.
            against.add(entry, place.is_some() && is_counted(entry.dtype), &scan);
        }
        match place {
            Some((layer, id)) => {
                problems.extend(problem_of(entry, id.shape(config)));
                found.insert((layer, id), matrix_of(entry, &scan));
            }
            None => add_to(&mut other[kind_of(&entry.name)], entry, &scan),
        }
        meter.add(entry.bytes);
    }
    meter.finish();
    for layer in 0..config.num_hidden_layers {
        for id in config.linears() {
            if !found.contains_key(&(layer, id)) {
                problems.push(Problem { tensor: id.tensor_name(layer), problem: "missing".into() });
            }
        }
    }
    let patterns = patterns_of(found.values());
    let mut layers: Vec<InspectedLayer> = (0..config.num_hidden_layers)
        .map(|layer| InspectedLayer { layer, sparsity: Zeros::default(), matrices: Vec::new() })
        .collect();
    for ((layer, _), matrix) in found {
        // `places` holds the layers of config.json only.
        layers[layer].matrices.push(matrix);
    }
    for layer in &mut layers {
        layer.sparsity = Zeros::sum(layer.matrices.iter().map(|matrix| &matrix.sparsity));
    }
    let matrices = || layers.iter().flat_map(|layer| &layer.matrices);
    let non_finite = matrices().map(|matrix| matrix.non_finite).sum::<u64>()
        + other.iter().map(|kind| kind.non_finite).sum::<u64>();
    let sparsity = Zeros::sum(layers.iter().map(|layer| &layer.sparsity));
    Ok(Inspection {
        schema: SCHEMA,
        model: model.folder().display().to_string(),
        num_hidden_layers: config.num_hidden_layers,
        hidden_size: config.hidden_size,
        parameters: tensors().map(|entry| entry.elements() as u64).sum(),
        bytes: model.total_bytes(),
        dtypes: dtypes_of(model),
        shards: model
            .shards()
            .iter()
            .map(|shard| ShardFile {
                file: shard.file_name.clone(),
                bytes: ByteSize(shard.file_bytes),
            })
            .collect(),
        sparsity,
        patterns,
        non_finite,
        layers,
        other: other.into_iter().filter(|kind| kind.tensors > 0).collect(),
        problems,
        against: against.map(|against| against.finish(model)),
        packed: None,
        zeros_gain: None,
        pruning: None,
    })
}

fn linears(config: &ModelConfig) -> HashMap<String, (usize, LinearId)> {
    (0..config.num_hidden_layers)
        .flat_map(|layer| config.linears().map(move |id| (layer, id)))
        .map(|(layer, id)| (id.tensor_name(layer), (layer, id)))
        .collect()
}

fn problem_of(entry: &TensorEntry, (rows, columns): (usize, usize)) -> Option<Problem> {
    let problem = if entry.shape != [rows, columns] {
        format!("shape {:?}, [{rows}, {columns}] expected by config.json", entry.shape)
    } else if !is_counted(entry.dtype) {
        format!("stored as {}: zeros are counted in F32, F16 and BF16", entry.dtype)
    } else {
        return None;
    };
    Some(Problem { tensor: entry.name.clone(), problem })
}

fn is_counted(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

fn matrix_of(entry: &TensorEntry, scan: &Scan) -> InspectedMatrix {
    let sparsity = Zeros::of(scan.zeros, entry.elements() as u64);
    let groups: Vec<GroupZeros> = GROUP_SIZES
        .into_iter()
        .zip(scan.fewest_zeros)
        .filter_map(|(m, fewest)| Some(GroupZeros { n: fewest?, m }))
        .filter(|group| group.n > 0 && is_counted(entry.dtype))
        .collect();
    let explains =
        |group: &&GroupZeros| f64::from(group.n) / group.m as f64 >= ACCOUNTS_FOR * sparsity.ratio;
    let pattern = groups.iter().find(explains);
    InspectedMatrix {
        name: entry.name.strip_suffix(".weight").unwrap_or(&entry.name).to_owned(),
        shape: entry.shape.clone(),
        dtype: entry.dtype.to_string(),
        sparsity,
        pattern: pattern.map(|group| format!("{}:{}", group.n, group.m)),
        groups,
        non_finite: scan.non_finite,
        changed: scan.compared.map(|compared| compared.changed),
    }
}

/// The kind of a tensor that is not a decoder linear, as an index of [`KINDS`].
fn kind_of(name: &str) -> usize {
    match name {
        "model.embed_tokens.weight" => 0,
        "lm_head.weight" => 1,
        _ if name.ends_with("norm.weight") => 2,
        _ if name.ends_with(".bias") => 3,
        _ => 4,
    }
}

fn nothing_of(kind: &str) -> OtherTensors {
    OtherTensors {
        kind: kind.to_owned(),
        tensors: 0,
        parameters: 0,
        bytes: ByteSize::ZERO,
        zeros: 0,
        non_finite: 0,
    }
}

fn add_to(kind: &mut OtherTensors, entry: &TensorEntry, scan: &Scan) {
    kind.tensors += 1;
    kind.parameters += entry.elements() as u64;
    kind.bytes = kind.bytes + ByteSize(entry.bytes);
    kind.zeros += scan.zeros;
    kind.non_finite += scan.non_finite;
}

fn patterns_of<'a>(matrices: impl Iterator<Item = &'a InspectedMatrix>) -> Vec<PatternCount> {
    let mut counts: BTreeMap<Option<&str>, usize> = BTreeMap::new();
    for matrix in matrices {
        *counts.entry(matrix.pattern.as_deref()).or_default() += 1;
    }
    let mut patterns: Vec<PatternCount> = counts
        .into_iter()
        .map(|(pattern, matrices)| PatternCount { pattern: pattern.map(str::to_owned), matrices })
        .collect();
    patterns.sort_by_key(|count| std::cmp::Reverse(count.matrices));
    patterns
}

fn dtypes_of(model: &Checkpoint) -> Vec<DtypeShare> {
    let names: BTreeSet<String> = model.tensors().map(|entry| entry.dtype.to_string()).collect();
    let mut dtypes: Vec<DtypeShare> = names
        .into_iter()
        .map(|dtype| {
            let of_it = || model.tensors().filter(|entry| entry.dtype.to_string() == dtype);
            DtypeShare {
                tensors: of_it().count(),
                bytes: of_it().map(|entry| ByteSize(entry.bytes)).sum(),
                dtype,
            }
        })
        .collect();
    dtypes.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    dtypes
}
