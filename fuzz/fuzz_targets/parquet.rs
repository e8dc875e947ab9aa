//! Parquet, as documents and as rows. The library panics at some; that is a refusal too.
#![no_main]

prune_fuzz::target!(input, {
    prune_fuzz::expect_blame();
    let path = prune_fuzz::put("d.parquet", input);
    prune_fuzz::read_text(None, &path);
    prune_fuzz::read_text(Some("wikitext2"), &path);
});
