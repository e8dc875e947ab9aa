//! Gzipped documents: the input as it is, or packed first, so that its checksum is right.
#![no_main]

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

prune_fuzz::target!(input, {
    let Some((&how, input)) = input.split_first() else {
        return;
    };
    let path = if how % 2 == 0 {
        prune_fuzz::put("d.gz", input)
    } else {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(input).expect("memory");
        prune_fuzz::put("d.gz", &encoder.finish().expect("memory"))
    };
    prune_fuzz::read_text(None, &path);
});
