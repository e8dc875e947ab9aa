//! The weights or the record of a packed folder: its matrices are read dense and without their zeros, or refused. The first byte of the
//! input names the file.
#![no_main]

prune_fuzz::target!(input, {
    let Some((file, content)) = input.split_first() else {
        return;
    };
    let file = prune_fuzz::PACKED_FILES[usize::from(file % 2)];
    let good = prune_fuzz::packed_file(file);
    prune_fuzz::put(&format!("p/{file}"), content);
    prune_fuzz::open_packed();
    prune_fuzz::put(&format!("p/{file}"), &good);
});
