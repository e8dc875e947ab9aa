//! Which tensors a random Llama has, at what scale, and which file each one lies in.

use super::random_checkpoint::RandomCheckpoint;
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The deviation of fresh weights, transformers' `initializer_range`.
const DEVIATION: f32 = 0.02;

/// One tensor to make.
#[derive(Debug)]
pub(super) struct RandomTensor {
    /// Its transformers name.
    pub(super) name: String,
    /// Its dimensions, outermost first.
    pub(super) shape: Vec<usize>,
    /// Its stored bytes.
    pub(super) bytes: u64,
    /// Its place in the list: the number of its random stream.
    pub(super) number: u64,
    /// The mean of its elements: 1 for norms, 0 for the rest.
    pub(super) mean: f32,
    /// The deviation of its elements.
    pub(super) deviation: f32,
}

struct TensorList {
    tensors: Vec<RandomTensor>,
    /// Bytes per element.
    each: u64,
    /// The bytes of all, `None` once they overflow.
    total: Option<u64>,
}

impl TensorList {
    fn add(&mut self, name: String, shape: Vec<usize>, mean: f32, deviation: f32) {
        let bytes = shape.iter().try_fold(self.each, |product, &length| {
            product.checked_mul(length as u64)
        });
        self.total = bytes.and_then(|bytes| self.total?.checked_add(bytes));
        let number = self.tensors.len() as u64;
        self.tensors.push(RandomTensor {
            name,
            shape,
            bytes: bytes.unwrap_or(0),
            number,
            mean,
            deviation,
        });
    }
}

/// Every tensor under its transformers name, in the order of a forward pass.
pub(super) fn tensors(model: &RandomCheckpoint) -> Result<Vec<RandomTensor>, Failure> {
    let mut list = TensorList {
        tensors: Vec::new(),
        each: model.dtype.bytes() as u64,
        total: Some(0),
    };
    let (hidden, mlp, head_dim) = (model.hidden_size, model.intermediate_size, model.head_dim());
    let attention = model.num_attention_heads.saturating_mul(head_dim);
    let key_value = model.num_key_value_heads.saturating_mul(head_dim);
    let residual = DEVIATION / (2.0 * model.num_hidden_layers as f32).sqrt();
    let linears = [
        (
            "self_attn.q_proj",
            attention,
            hidden,
            model.attention_bias,
            DEVIATION,
        ),
        (
            "self_attn.k_proj",
            key_value,
            hidden,
            model.attention_bias,
            DEVIATION,
        ),
        (
            "self_attn.v_proj",
            key_value,
            hidden,
            model.attention_bias,
            DEVIATION,
        ),
        (
            "self_attn.o_proj",
            hidden,
            attention,
            model.attention_bias,
            residual,
        ),
        ("mlp.gate_proj", mlp, hidden, model.mlp_bias, DEVIATION),
        ("mlp.up_proj", mlp, hidden, model.mlp_bias, DEVIATION),
        ("mlp.down_proj", hidden, mlp, model.mlp_bias, residual),
    ];
    list.add(
        "model.embed_tokens.weight".into(),
        vec![model.vocab_size, hidden],
        0.0,
        DEVIATION,
    );
    for layer in 0..model.num_hidden_layers {
        let prefix = format!("model.layers.{layer}");
        list.add(
            format!("{prefix}.input_layernorm.weight"),
            vec![hidden],
            1.0,
            DEVIATION,
        );
        list.add(
            format!("{prefix}.post_attention_layernorm.weight"),
            vec![hidden],
            1.0,
            DEVIATION,
        );
        for (name, rows, columns, has_bias, deviation) in linears {
            list.add(
                format!("{prefix}.{name}.weight"),
                vec![rows, columns],
                0.0,
                deviation,
            );
            if has_bias {
                list.add(format!("{prefix}.{name}.bias"), vec![rows], 0.0, deviation);
            }
        }
    }
    list.add("model.norm.weight".into(), vec![hidden], 1.0, DEVIATION);
    if !model.tie_word_embeddings {
        list.add(
            "lm_head.weight".into(),
            vec![model.vocab_size, hidden],
            0.0,
            DEVIATION,
        );
    }
    // Offsets are `usize` in a header.
    if list
        .total
        .is_none_or(|total| usize::try_from(total).is_err())
    {
        return Err(Failure::new(
            "cannot make a random Llama: its size overflows",
        ));
    }
    Ok(list.tensors)
}

/// Fills one file after the other, in order.
pub(super) fn shards(tensors: &[RandomTensor], max_shard: ByteSize) -> Vec<&[RandomTensor]> {
    let mut shards = Vec::new();
    let (mut first, mut held) = (0, 0);
    for (at, tensor) in tensors.iter().enumerate() {
        if at > first && held + tensor.bytes > max_shard.0 {
            shards.push(&tensors[first..at]);
            (first, held) = (at, 0);
        }
        held += tensor.bytes;
    }
    shards.push(&tensors[first..]);
    shards
}
