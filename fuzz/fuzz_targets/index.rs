//! `model.safetensors.index.json` beside good shards.
#![no_main]

prune_fuzz::target!(input, {
    prune_fuzz::put("s/model.safetensors.index.json", input);
    prune_fuzz::open("s");
});
