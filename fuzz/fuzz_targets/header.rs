//! A safetensors file beside a good config: opened and read, or refused.
#![no_main]

prune_fuzz::target!(input, {
    prune_fuzz::put("m/model.safetensors", input);
    prune_fuzz::open("m");
});
