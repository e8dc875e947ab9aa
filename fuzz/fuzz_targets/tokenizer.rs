//! `tokenizer.json`: loaded and used, or refused. The library panics at some; that is a refusal too.
#![no_main]

use prune::data::Tokenizer;
use prune::data::footprint::TokenizerSize;

prune_fuzz::target!(input, {
    prune_fuzz::expect_blame();
    let path = prune_fuzz::put("m/tokenizer.json", input);
    let folder = path.parent().expect("the model's folder");
    let _ = TokenizerSize::of(folder);
    if let Ok(tokenizer) = Tokenizer::load(folder) {
        let ids = tokenizer.encode("the <s> layer\u{e9}  of\na column").unwrap_or_default();
        let _ = tokenizer.decode(&ids);
    }
});
