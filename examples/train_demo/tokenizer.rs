//! The tokenizer of the demo model: byte-level BPE, trained on the stories. Every byte is a token, so any text can be written. A text
//! has no special tokens around it. The newline that ends a story is a token of its own.

use anyhow::{Error, Result};
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// Stories from which the merges are learned. They contain all words.
const STORIES: usize = 5_000;

/// Trains on the first stories of a text with one story per line.
pub(crate) fn train(text: &str, vocab_size: usize) -> Result<Tokenizer> {
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(byte_level));
    tokenizer.with_decoder(Some(byte_level));
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut trainer = TrainerWrapper::from(trainer);
    tokenizer.train(&mut trainer, text.split_inclusive('\n').take(STORIES)).map_err(Error::msg)?;
    Ok(tokenizer)
}

/// The ids of a text, encoded line by line. No token crosses a newline.
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let encoded = tokenizer.encode_batch_fast(lines, false).map_err(Error::msg)?;
    Ok(encoded.iter().flat_map(|line| line.get_ids()).copied().collect())
}

/// `tokenizer_config.json` beside it.
pub(crate) fn config_json(seqlen: usize) -> Value {
    json!({
        "clean_up_tokenization_spaces": false,
        "model_max_length": seqlen,
        "tokenizer_class": "PreTrainedTokenizerFast"
    })
}
