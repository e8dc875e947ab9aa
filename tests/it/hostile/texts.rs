//! Hostile texts: JSON lines, archives, parquet, lines and words without an end.

use super::{FORMS, documents, gzipped, nested, parquet_bytes, put, refuses_text};
use crate::support::{Place, words};

const LINES: &str = "hint: write each object in one line, or all objects as one list; correct or leave out a damaged line";

#[test]
fn lines_that_are_no_documents_are_named() {
    let place = Place::new();
    let good = documents(5);
    let is_no = |line: usize, why: &str| {
        format!("error: line {line} of `d.jsonl` is not a document: {why}")
    };
    let first_lines = [
        (
            "{\"txt\": \"a\"}\n".to_string(),
            is_no(1, "it has none of the fields that documents are made of"),
            FORMS,
        ),
        (
            "{\"text\": 5}\n".into(),
            is_no(1, "`text` is a number, not a string"),
            "hint: write \"text\": \"…\", or leave the line out",
        ),
        (
            format!("{{\"text\": {}\n", nested()),
            is_no(1, "it is not JSON: recursion limit exceeded at column 136"),
            LINES,
        ),
        ("\0\0\0\0\n".into(), is_no(1, "it is not JSON: expected value at column 1"), LINES),
        (
            "\n \n".into(),
            "error: no documents in `d.jsonl`".into(),
            "hint: name a file that has documents",
        ),
    ];
    for (text, first, hint) in first_lines {
        let ran = refuses_text(&place, "d.jsonl", text.as_bytes(), &first, hint);
        assert!(ran.stderr.starts_with("error: "), "before any work: {}", ran.stderr);
    }
    // The sixth line, found when it is drawn.
    let text = format!("{good}{}", "{\"txt\": 1}\n".repeat(1000));
    put(&place, "d.jsonl", text);
    let ran = place.run(
        "--model m --sparsity-ratio 0.5 --dataset d.jsonl --eval-dataset test.txt --nsamples 4 --seqlen 64 --eval-windows 5",
    );
    assert!(
        ran.code == 1
            && ran.stderr.contains("of `d.jsonl` is not a document: it has none of the fields")
            && ran.stderr.contains("fields found: txt\n"),
        "{}",
        ran.stderr
    );
    // A part of the line is quoted.
    for line in [format!("\"{}\"\n", "x".repeat(5_000_000)), {
        let fields: Vec<String> = (0..100_000).map(|at| format!("\"f{at}\":1")).collect();
        format!("{{{}}}\n", fields.join(","))
    }] {
        put(&place, "d.jsonl", line);
        let ran = place.run("eval --model m --eval-dataset d.jsonl --seqlen 64");
        assert!(ran.code == 1 && ran.stderr.len() < 3000, "{} bytes", ran.stderr.len());
    }
    let texts = "{\"text\":\"\"}\n".repeat(1000);
    let ran = refuses_text(
        &place,
        "d.jsonl",
        texts.as_bytes(),
        "error: found 0 of 4 documents with more than --seqlen 64 tokens",
        "hint: use a text of long documents, such as --dataset wikitext2:PATH",
    );
    assert!(
        ran.stderr.contains("\n  1000 different documents of 1000 tried in `d.jsonl`\n"),
        "{}",
        ran.stderr
    );
}

#[test]
fn archives_that_are_damaged_or_never_end_are_refused() {
    let place = Place::new();
    let good = gzipped(documents(50).as_bytes(), 1);
    let damaged = "hint: the file is damaged or incomplete: copy it again";
    let mut wrong_sum = good.clone();
    let sum = wrong_sum.len() - 8;
    wrong_sum[sum..].fill(0);
    for (bytes, why) in [
        (&good[..good.len() - 20], "incomplete deflate stream"),
        (&[&b"\x1f\x8b"[..], &[7; 500]].concat(), "invalid gzip header"),
        (&wrong_sum, "corrupt gzip stream does not have a matching checksum"),
        (&[&good[..], b"more than a header"].concat(), "invalid gzip header"),
    ] {
        let first = format!("error: cannot read `d.gz`: {why}");
        refuses_text(&place, "d.gz", bytes, &first, damaged);
    }
    // Lines that hold next to nothing, and lines that are blank, 70 and more members of them.
    let hint = "hint: if it is meant, unpack it (gzip -dc FILE.gz > text.jsonl) and name the unpacked file";
    let line = b"{\"text\":\"a\"}\n".repeat(1 << 16);
    for bomb in [
        gzipped(&line, 80),
        gzipped(&[&documents(1).into_bytes()[..], &vec![b'\n'; 1 << 20]].concat(), 70),
    ] {
        let first = "error: `d.gz` unpacks to more than 64.00 MiB";
        let ran = refuses_text(&place, "d.gz", &bomb, first, hint);
        assert!(ran.stderr.contains("the limit is 100 times the file's size\n"), "{}", ran.stderr);
    }
    let long = [&documents(1).into_bytes()[..], &vec![b'x'; (64 << 20) + 1]].concat();
    refuses_text(
        &place,
        "d.gz",
        &gzipped(&long, 1),
        "error: `d.gz` unpacks to more than 64.00 MiB",
        hint,
    );
}

#[test]
fn parquet_of_another_schema_cut_or_made_up_is_refused() {
    let place = Place::new();
    let rows: Vec<Vec<u8>> = (0..50).map(|seed| words(seed, 30).into_bytes()).collect();
    let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
    let good = parquet_bytes("text", &rows);
    let copy = "hint: copy the file again; columns may be uncompressed, or packed by snappy, zstd, gzip, lz4 or brotli";
    let cannot = |why: &str| format!("error: cannot read `d.parquet` as parquet: {why}");
    refuses_text(
        &place,
        "d.parquet",
        &parquet_bytes("content", &rows),
        "error: `d.parquet` has no columns that documents are made of",
        FORMS,
    );
    let truncated = "Parquet error: Invalid Parquet file. Corrupt footer";
    let mut long_footer = good.clone();
    let at = long_footer.len() - 8;
    long_footer[at..at + 4].fill(0xff);
    for (bytes, why) in [
        (&b"PAR1"[..], "EOF: Parquet file too small. Size is 4 but need 8"),
        (&good[..good.len() / 2], truncated),
        (&[&b"PAR1"[..], &[0xa5; 300]].concat(), truncated),
        (
            &long_footer,
            &format!("EOF: Parquet file too small. Size is {} but need 4294967303", good.len()),
        ),
    ] {
        refuses_text(&place, "d.parquet", bytes, &cannot(why), copy);
    }
    // One value, written once and meant 70 times.
    let value = vec![b'x'; 1 << 20];
    let bomb = parquet_bytes("text", &[&value[..]; 70]);
    assert!(bomb.len() < 1 << 20, "{} bytes", bomb.len());
    refuses_text(
        &place,
        "d.parquet",
        &bomb,
        "error: `d.parquet` unpacks to more than 64.00 MiB",
        "hint: if it is meant, write its rows as JSON lines ({\"text\": ...}) and name that file",
    );
}

#[test]
fn a_line_and_a_word_without_an_end_are_refused() {
    let place = Place::new();
    let endless = b"layer norm ".repeat(((64 << 20) / 11) + 1);
    put(&place, "wiki.train.raw", &endless);
    let ran = place.run(
        "--model m --sparsity-ratio 0.5 --dataset wikitext2:wiki.train.raw --eval-dataset test.txt --nsamples 4 --seqlen 64 --eval-windows 5",
    );
    assert!(
        ran.code == 1
            && ran.stderr.contains("error: a line of `wiki.train.raw` is longer than 64.00 MiB\n")
            && ran.stderr.contains("hint: "),
        "{}",
        ran.stderr
    );
    let text = [&b"{\"text\":\"a\"}\n{\"text\":\""[..], &endless].concat();
    put(&place, "d.jsonl", text);
    let ran = place.run(
        "--model m --sparsity-ratio 0.5 --dataset d.jsonl --eval-dataset test.txt --nsamples 4 --seqlen 64 --eval-windows 5",
    );
    assert!(
        ran.code == 1
            && ran.stderr.contains("error: a line of `d.jsonl` is longer than 64.00 MiB\n")
            && ran.stderr.contains("hint: "),
        "{}",
        ran.stderr
    );
    put(&place, "word.txt", vec![b'a'; (32 << 20) + (1 << 20)]);
    let ran = place.run(
        "--model m --sparsity-ratio 0.5 --dataset word.txt --eval-dataset test.txt --nsamples 4 --seqlen 64 --eval-windows 5",
    );
    assert!(
        ran.code == 1
            && ran.stderr.contains("error: a text has more than 32.00 MiB")
            && ran.stderr.contains("hint: "),
        "{}",
        ran.stderr
    );
}
