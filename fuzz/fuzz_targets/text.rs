//! Text of lines: as it stands, as WikiText-2's rows, as the Penn Treebank's sentences.
#![no_main]

prune_fuzz::target!(input, {
    let path = prune_fuzz::put("d.txt", input);
    for name in [None, Some("wikitext2"), Some("ptb")] {
        prune_fuzz::read_text(name, &path);
    }
});
