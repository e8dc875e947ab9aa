//! [`Parts`]: the tensors of an adapter's file that change a tensor of the base, checked against one another.

use std::collections::BTreeMap;

use anyhow::Result;

use super::change::{TensorChange, TokenRows};
use super::config::AdapterConfig;
use super::keys::{ChangePart, module_of};
use super::low_rank::Panels;
use super::stored::Stored;
use crate::checkpoint::TensorEntry;
use crate::failure::Failure;
use crate::linalg::LowRank;

/// Ends of the names of tensors with a row per token.
const OF_TOKENS: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

/// The change of a tensor of the base, before its factors are read.
#[derive(Debug, Clone, Default)]
pub(super) struct Parts {
    /// A tensor in place of the base's.
    pub(super) whole: Option<Stored>,
    pub(super) product: Option<ProductSource>,
    magnitude: Option<Stored>,
    /// Rows in place of the base's: `[tokens, columns]`, and where they belong.
    pub(super) tokens: Option<(Stored, Vec<usize>)>,
}

/// Factors in a file.
#[derive(Debug, Clone)]
pub(super) enum ProductSource {
    /// A and B.
    Stored { down: Stored, up: Stored, is_embedding: bool, rank: usize, scale: f32 },
    /// The bias of B. As a product, it has 1 row and rank 1.
    Bias { bias: Stored, scale: f32 },
}

/// The shape of two factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FactorShape {
    /// Rows of the base's tensor.
    pub(super) rows: usize,
    /// Columns of the base's tensor.
    pub(super) columns: usize,
    pub(super) rank: usize,
    pub(super) is_embedding: bool,
}

impl Parts {
    /// Puts the parts of `tensor` together.
    ///
    /// # Errors
    /// Fails when a factor has no partner, when two parts exclude one another, and when shapes or ranks do not fit.
    pub(super) fn new(
        tensor: &str,
        mut found: BTreeMap<ChangePart, Stored>,
        config: &AdapterConfig,
    ) -> Result<Self, Failure> {
        let linear = pair(&mut found, [ChangePart::Down, ChangePart::Up])?;
        let embedding = pair(&mut found, [ChangePart::EmbeddingDown, ChangePart::EmbeddingUp])?;
        let bias = found.remove(&ChangePart::UpBias);
        let magnitude = found.remove(&ChangePart::Magnitude);
        let copy = found.remove(&ChangePart::Copy);
        let saved = found.remove(&ChangePart::SavedModule);
        let saved = found.remove(&ChangePart::Whole).or(saved);
        let tokens = found.remove(&ChangePart::Tokens);
        let others = usize::from(saved.is_some()) + usize::from(tokens.is_some());
        let ways = usize::from(linear.is_some()) + usize::from(embedding.is_some()) + others;
        // The bias of B may come on top of a bias that was trained.
        if ways > 1 || (copy.is_some() && others > 0) {
            return Err(Failure::new(format!("the adapter changes `{tensor}` in two ways"))
                .detail("factors, a saved module and trained tokens exclude one another"));
        }
        let product = match (linear, embedding, bias) {
            (Some(pair), _, _) => Some(ProductSource::of_pair(tensor, pair, false, config)?),
            (_, Some(pair), _) => Some(ProductSource::of_pair(tensor, pair, true, config)?),
            (_, _, Some(bias)) => {
                let (_, scale) = config.rank_and_scale(module_of(tensor))?;
                Some(ProductSource::Bias { bias, scale })
            }
            _ => None,
        };
        let tokens = tokens.map(|stored| token_rows(tensor, stored, config));
        let parts = Self { whole: copy.or(saved), product, magnitude, tokens: tokens.transpose()? };
        parts.check_magnitude(tensor, config)?;
        parts.check_copy(tensor)?;
        Ok(parts)
    }

    /// Checks that linear layers have magnitudes if the adapter is of DoRA, and nothing else has.
    fn check_magnitude(&self, tensor: &str, config: &AdapterConfig) -> Result<(), Failure> {
        let is_embedding = match &self.product {
            Some(ProductSource::Stored { is_embedding, .. }) => Some(*is_embedding),
            _ => None,
        };
        match (&self.magnitude, is_embedding, config.use_dora) {
            (_, Some(true), true) => {
                Err(Failure::new(format!("the adapter changes the embedding `{tensor}` by DoRA"))
                    .detail(
                        "DoRA of linear layers is read; that of an embedding has a norm per column",
                    )
                    .hint("fold this adapter into its base with peft: model.merge_and_unload()"))
            }
            (None, Some(false), true) => {
                Err(Failure::new(format!("the adapter has no magnitude vector for `{tensor}`"))
                    .detail("`use_dora` is set in its config")
                    .hint("download the adapter again"))
            }
            (Some(magnitude), Some(false), true) => {
                let rows = self.product.as_ref().map_or(0, |product| product.shape().0);
                match magnitude.entry.elements() == rows {
                    true => Ok(()),
                    false => Err(Failure::new(format!(
                        "the adapter's tensor `{}` does not fit its factors",
                        magnitude.key()
                    ))
                    .detail(format!(
                        "it is {:?}, the factors make {rows} rows",
                        magnitude.entry.shape
                    ))),
                }
            }
            (Some(magnitude), _, use_dora) => Err(Failure::new(format!(
                "the adapter's tensor `{}` has no meaning",
                magnitude.key()
            ))
            .detail(match use_dora {
                true => "there are no factors for it",
                false => "`use_dora` is not set in its config",
            })),
            (None, _, _) => Ok(()),
        }
    }

    /// Checks that a tensor in place of the base's has the shape that the factors make.
    fn check_copy(&self, tensor: &str) -> Result<(), Failure> {
        let (Some(whole), Some(product)) = (&self.whole, &self.product) else {
            return Ok(());
        };
        if product.fits(&whole.entry.shape) {
            return Ok(());
        }
        let (rows, columns) = product.shape();
        Err(Failure::new(format!("the adapter's parts of `{tensor}` do not fit"))
            .detail(format!("`{}` is {:?}", whole.key(), whole.entry.shape))
            .detail(format!("its factors make [{rows}, {columns}]")))
    }

    /// Checks that the parts fit `base`, the tensor they change.
    pub(super) fn check(&self, base: &TensorEntry) -> Result<(), Failure> {
        super::stored::stored_dtype(base)?;
        let misfit = |what: String| {
            Failure::new(format!("the adapter does not fit `{}` of the base", base.name))
                .detail(format!("{what}, the base's tensor is {:?}", base.shape))
                .hint("name the base that the adapter was trained on: MODEL+ADAPTER")
        };
        if let Some(whole) = &self.whole
            && whole.entry.shape != base.shape
        {
            if !self.has_more_tokens(base) {
                return Err(misfit(format!("`{}` is {:?}", whole.key(), whole.entry.shape)));
            }
            if self.product.is_some() || self.tokens.is_some() {
                return Err(misfit(format!("`{}` is {:?}", whole.key(), whole.entry.shape))
                    .detail("factors on an embedding with added tokens are not read")
                    .hint("fold this adapter into its base with peft: model.merge_and_unload()"));
            }
        }
        if let Some(product) = &self.product
            && !product.fits(&base.shape)
        {
            let (rows, columns) = product.shape();
            return Err(misfit(format!("its factors make [{rows}, {columns}]")));
        }
        if let Some((tokens, rows)) = &self.tokens {
            if base.shape.len() != 2 || base.shape[1] != tokens.entry.shape[1] {
                return Err(misfit(format!("`{}` is {:?}", tokens.key(), tokens.entry.shape)));
            }
            if let Some(row) = rows.iter().find(|row| **row >= base.shape[0]) {
                return Err(misfit(format!("it changes row {row}")));
            }
        }
        Ok(())
    }

    /// Returns whether the adapter replaces an embedding or a head by a tensor with more rows: tokens were added in training.
    fn has_more_tokens(&self, base: &TensorEntry) -> bool {
        let Some(Stored { entry: TensorEntry { shape: own, .. }, .. }) = &self.whole else {
            return false;
        };
        OF_TOKENS.iter().any(|name| base.name.ends_with(name))
            && matches!((&own[..], &base.shape[..]), ([more, width], [rows, same]) if more > rows && width == same)
    }

    /// The tensor of the adapted model, if the adapter adds rows to the base's tensor.
    pub(super) fn grown(&self, tensor: &str, base: &TensorEntry) -> Option<TensorEntry> {
        let own = self.whole.as_ref().filter(|_| self.has_more_tokens(base))?;
        let (rows, shape) = (own.entry.shape[0] as u64, own.entry.shape.clone());
        let bytes = base.bytes / base.shape[0].max(1) as u64 * rows;
        Some(TensorEntry { name: tensor.to_owned(), shape, bytes, ..base.clone() })
    }

    /// Reads the factors.
    pub(super) fn change(&self, tensor: &str) -> Result<TensorChange> {
        let product = self.product.as_ref();
        let columns = match (product, &self.whole, &self.tokens) {
            (Some(product), _, _) => product.shape().1,
            (_, Some(of), _) | (_, _, Some((of, _))) => of.entry.shape.last().copied().unwrap_or(1),
            (None, None, None) => 0,
        };
        let tokens = match &self.tokens {
            None => None,
            Some((stored, rows)) => {
                let mut places: Vec<_> = rows.iter().copied().zip(0..).collect();
                places.sort_unstable();
                let values = stored.read()?;
                Some(TokenRows { places, values })
            }
        };
        Ok(TensorChange {
            tensor: tensor.to_owned(),
            columns,
            whole: self.whole.clone(),
            tokens,
            product: product.map(ProductSource::read).transpose()?.map(Panels::new),
            magnitude: self.magnitude.as_ref().map(Stored::read).transpose()?,
        })
    }

    /// The shape of the factors; `None` if the change is more than factors, at most with the base's copy under them.
    pub(super) fn factor_shape(&self) -> Option<FactorShape> {
        let product = self.product.as_ref().filter(|_| self.magnitude.is_none());
        let (rows, columns) = product?.shape();
        match product? {
            ProductSource::Bias { .. } => None,
            ProductSource::Stored { is_embedding, rank, .. } => {
                Some(FactorShape { rows, columns, rank: *rank, is_embedding: *is_embedding })
            }
        }
    }
}

impl ProductSource {
    /// Checks a pair of factors.
    fn of_pair(
        tensor: &str,
        [down, up]: [Stored; 2],
        is_embedding: bool,
        config: &AdapterConfig,
    ) -> Result<Self, Failure> {
        let (rank, scale) = config.rank_and_scale(module_of(tensor))?;
        let shapes = (down.matrix(), up.matrix());
        let fits = match shapes {
            (Some((r_down, columns)), Some((rows, r_up))) => {
                r_down == r_up && r_up == rank && columns > 0 && rows > 0
            }
            _ => false,
        };
        if !fits {
            return Err(
                Failure::new(format!("the adapter's factors of `{tensor}` do not fit"))
                    .detail(format!("`{}` is {:?}", down.key(), down.entry.shape))
                    .detail(format!("`{}` is {:?}", up.key(), up.entry.shape))
                    .detail(format!(
                        "the adapter's config gives the module rank {rank}: [{rank}, ·] and [·, {rank}] are expected"
                    )),
            );
        }
        Ok(Self::Stored { down, up, is_embedding, rank, scale })
    }

    /// Rows and columns of the change.
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Stored { down, up, is_embedding, .. } => {
                let (inner, outer) = (down.entry.shape[1], up.entry.shape[0]);
                match is_embedding {
                    true => (inner, outer),
                    false => (outer, inner),
                }
            }
            Self::Bias { bias, .. } => (1, bias.entry.elements()),
        }
    }

    /// Returns whether the change fits a tensor of this shape.
    fn fits(&self, shape: &[usize]) -> bool {
        let (rows, columns) = self.shape();
        match self {
            Self::Bias { .. } => shape == [columns],
            Self::Stored { .. } => shape == [rows, columns],
        }
    }

    /// Reads the factors in f32; an embedding's are transposed and change places.
    pub(super) fn read(&self) -> Result<LowRank> {
        let (rows, columns) = self.shape();
        Ok(match self {
            Self::Bias { bias, scale } => {
                LowRank { rows, columns, rank: 1, scale: *scale, a: bias.read()?, b: vec![1.0] }
            }
            Self::Stored { down, up, is_embedding, rank, scale } => {
                let (rank, scale) = (*rank, *scale);
                let (a, b) = match is_embedding {
                    false => (down.read()?, up.read()?),
                    // (B A)ᵀ = Aᵀ Bᵀ
                    true => (transposed(&up.read()?, rank), transposed(&down.read()?, rows)),
                };
                LowRank { rows, columns, rank, scale, a, b }
            }
        })
    }
}

/// Takes both of two factors, or none.
fn pair(
    found: &mut BTreeMap<ChangePart, Stored>,
    parts: [ChangePart; 2],
) -> Result<Option<[Stored; 2]>, Failure> {
    match parts.map(|part| found.remove(&part)) {
        [Some(down), Some(up)] => Ok(Some([down, up])),
        [None, None] => Ok(None),
        [Some(lonely), None] | [None, Some(lonely)] => {
            Err(Failure::new(format!("the adapter's tensor `{}` has no partner", lonely.key()))
                .detail("factors come in pairs: `lora_A` and `lora_B`")
                .hint("download the adapter again"))
        }
    }
}

/// Trained tokens of `tensor` with the rows that `trainable_token_indices` names.
fn token_rows(
    tensor: &str,
    stored: Stored,
    config: &AdapterConfig,
) -> Result<(Stored, Vec<usize>), Failure> {
    let wrong = |why: String| {
        Failure::new(format!("the adapter's trained tokens of `{tensor}` are not clear"))
            .detail(why)
            .detail(format!("`{}` is {:?}", stored.key(), stored.entry.shape))
    };
    let Some(rows) = config.token_rows(module_of(tensor)) else {
        return Err(wrong("`trainable_token_indices` does not name this module".into()));
    };
    if stored.matrix().is_none_or(|(tokens, _)| tokens != rows.len()) {
        return Err(wrong(format!("`trainable_token_indices` names {} tokens", rows.len())));
    }
    let mut sorted = rows.to_vec();
    sorted.sort_unstable();
    if let Some(two) = sorted.windows(2).find(|two| two[0] == two[1]) {
        return Err(wrong(format!("`trainable_token_indices` names token {} twice", two[0])));
    }
    let rows = rows.to_vec();
    Ok((stored, rows))
}

/// The transpose of a matrix with these `columns`.
pub(super) fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns.max(1);
    let mut out = vec![0.0; values.len()];
    for (row, from) in values.chunks(columns.max(1)).enumerate() {
        for (column, value) in from.iter().enumerate() {
            out[column * rows + row] = *value;
        }
    }
    out
}
