//! The gain of a model's zeros on this machine: the memory of its linears without them, and the time of a token's products.
//!
//! Some rows of the first layer are held in both forms, and multiplied in turn. So a measurement takes little memory, whatever the model.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::generation::DecodingArithmetic;
use crate::linalg::linear::SingleToken;
use crate::linalg::{
    CompactMatrix, KeptForm, Linear, ProductContext, StoredDtype, StoredMatrix, Weight,
};
use crate::model::{KeptShares, ModelConfig, WeightForm, WeightForms};
use crate::run::ZerosGain;

/// Bytes of the dense rows that are measured, at most: more than the cache of a small machine, and little memory.
const SAMPLE: ByteSize = ByteSize(64 << 20);

/// Passes in each form; the fastest counts.
const PASSES: usize = 5;

/// Measures the gain; `None` where the matrices do not become smaller.
///
/// # Arguments
/// * `room`: memory that the measurement may take
///
/// # Errors
/// Fails when a matrix is missing or cannot be read.
pub(super) fn measured(
    source: &dyn WeightSource,
    config: &ModelConfig,
    dtype: StoredDtype,
    room: ByteSize,
) -> Result<Option<ZerosGain>> {
    let forms = WeightForms::new(WeightForm::Compact, KeptShares::sampled(source, config)?);
    let all = |forms: &WeightForms| {
        ByteSize(forms.layer_bytes(config, dtype).0 * config.num_hidden_layers as u64)
    };
    let (dense_bytes, compact_bytes) = (all(&WeightForms::dense()), all(&forms));
    if compact_bytes >= dense_bytes {
        return Ok(None);
    }
    // The rows, at most as many bytes without zeros, and copies of the rows that become compact.
    let dense = sampled_rows(source, config, SAMPLE.min(ByteSize(room.0 / 3)))?;
    let compact = dense.iter().map(|matrix| {
        CompactMatrix::of(matrix, KeptForm::Stored(matrix.dtype())).map(Weight::Compact)
    });
    let compact = compact.collect::<Result<Vec<_>>>()?;
    let [dense, compact] = [dense.into_iter().map(Weight::Held).collect(), compact]
        .map(|weights: Vec<Weight>| weights.into_iter().map(|weight| Linear::new(weight, None)));
    let (dense, compact): (Vec<_>, Vec<_>) = (dense.collect(), compact.collect());
    let times_as_fast = match dense.is_empty() {
        true => None,
        false => Some(times_as_fast([&dense, &compact], DecodingArithmetic::default())?),
    };
    Ok(Some(ZerosGain { dense_bytes, compact_bytes, times_as_fast }))
}

/// The first rows of the matrices of the first layer, of this many bytes together.
fn sampled_rows(
    source: &dyn WeightSource,
    config: &ModelConfig,
    room: ByteSize,
) -> Result<Vec<StoredMatrix>> {
    let mut left = room.0 as usize;
    let mut sampled = Vec::new();
    for id in config.linears() {
        let (rows, columns) = id.shape(config);
        let entry = source.require(&id.tensor_name(0), &[rows, columns])?;
        let Some(dtype) = StoredDtype::of_file(entry.dtype) else { continue };
        let rows = rows.min(left / (columns * dtype.bytes()).max(1));
        if rows > 0 {
            let mut matrix = StoredMatrix::zeros(dtype, rows, columns)?;
            source.read(entry, 0, matrix.as_bytes_mut())?;
            left -= matrix.as_bytes().len();
            sampled.push(matrix);
        }
    }
    Ok(sampled)
}

/// Times the products of a token with the same matrices in two forms. Returns how many times as fast the second form is.
///
/// # Errors
/// Fails when a weight at rest cannot be read.
pub(super) fn times_as_fast<'l>(
    forms: [impl IntoIterator<Item = &'l Linear>; 2],
    arithmetic: DecodingArithmetic,
) -> Result<f64> {
    let forms = forms.map(|linears| Vec::from_iter(linears));
    let mut context = ProductContext::new();
    context.products = arithmetic.products;
    let widest = |size: fn(&Linear) -> usize| forms[0].iter().map(|linear| size(linear)).max();
    let x = vec![1.0; widest(Linear::in_features).unwrap_or(0)];
    let mut out = vec![0.0; widest(Linear::out_features).unwrap_or(0)];
    let mut best = [f64::INFINITY; 2];
    for _ in 0..PASSES {
        for (linears, best) in forms.iter().zip(&mut best) {
            let began = Instant::now();
            for linear in linears {
                let (x, out) = (&x[..linear.in_features()], &mut out[..linear.out_features()]);
                linear.forward(x, out, SingleToken::MatrixVector, &mut context)?;
            }
            black_box(&out);
            *best = best.min(began.elapsed().as_secs_f64());
        }
    }
    Ok(best[0] / best[1])
}
