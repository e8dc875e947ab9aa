//! Documents as JSON lines.
#![no_main]

prune_fuzz::target!(input, {
    prune_fuzz::read_text(None, &prune_fuzz::put("d.jsonl", input));
});
