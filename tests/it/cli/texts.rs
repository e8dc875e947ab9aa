//! Texts in files and folders.

use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::support::{Place, words};

#[test]
fn documents_are_read_from_json_lines_and_gzip_by_path() {
    let place = Place::new();
    let documents: String = (0..20)
        .map(|number| format!("{}\n", serde_json::json!({"text": words(number, 60), "url": "x"})))
        .collect();
    fs::write(place.path("documents.jsonl"), &documents).unwrap();
    let mut gzip = GzEncoder::new(
        fs::File::create(place.path("documents.json.gz")).unwrap(),
        Compression::fast(),
    );
    gzip.write_all(documents.as_bytes()).unwrap();
    gzip.finish().unwrap();
    let mut runs = Vec::new();
    for (file, save) in [("documents.jsonl", "plain"), ("documents.json.gz", "packed")] {
        let ran = place.run(&format!(
            "--model m --sparsity-ratio 0.5 --dataset {file} --eval-dataset {file} \
             --nsamples 4 --seqlen 64 --save {save}"
        ));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let manifest = place.manifest(save);
        let calibration = manifest.calibration.unwrap();
        assert_eq!(calibration.dataset, "documents");
        assert_eq!(calibration.documents.map(|all| all.len()), Some(4));
        runs.push((
            calibration.tokens_sha256,
            manifest.perplexity.pruned.unwrap().perplexity.to_bits(),
        ));
    }
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn wikitext2_is_found_in_its_folder() {
    let place = Place::new();
    fs::create_dir(place.path("wiki")).unwrap();
    for split in ["train", "test"] {
        let text = words(3, 2000);
        fs::write(place.path(&format!("wiki/wiki.{split}.raw")), text).unwrap();
    }
    let ran = place.run(
        "--model m --sparsity-ratio 0.5 --dataset wikitext2:wiki \
         --eval-dataset wikitext2:wiki --nsamples 2 --seqlen 64 --eval-windows 2 \
         --save out",
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stdout.contains(" over windows (wikitext2, 2 windows of 64 tokens)\n"),
        "{}",
        ran.stdout
    );
    let manifest = place.manifest("out");
    assert_eq!(manifest.calibration.unwrap().path, "wiki/wiki.train.raw");
    assert_eq!(manifest.evaluation.unwrap().path, "wiki/wiki.test.raw");
}
