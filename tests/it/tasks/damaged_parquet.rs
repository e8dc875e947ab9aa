//! Parquet files of a task with wrong columns, wrong values and damaged bytes: each is one error with file and row.

use std::fs;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::support::Place;

/// A column of optional values.
enum Column<'a> {
    Texts(&'a str, Vec<Option<&'a str>>),
    Numbers(&'a str, Vec<Option<i64>>),
}

/// A file with these columns, in a single row group.
fn parquet(columns: &[Column<'_>]) -> Vec<u8> {
    let field = |column: &Column<'_>| match column {
        Column::Texts(name, _) => format!("optional binary {name} (UTF8);"),
        Column::Numbers(name, _) => format!("optional int64 {name};"),
    };
    let fields: String = columns.iter().map(field).collect();
    let schema = parse_message_type(&format!("message rows {{ {fields} }}")).expect("a schema");
    let mut file = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut file, Arc::new(schema), Arc::default()).expect("a writer");
    let mut group = writer.next_row_group().expect("a row group");
    let levels = |present: Vec<bool>| present.into_iter().map(i16::from).collect::<Vec<_>>();
    for column in columns {
        let mut next = group.next_column().expect("a column").expect("as in the schema");
        match column {
            Column::Texts(_, values) => {
                let present = values.iter().flatten().map(|text| ByteArray::from(*text));
                let levels = levels(values.iter().map(Option::is_some).collect());
                let column = next.typed::<ByteArrayType>();
                column.write_batch(&present.collect::<Vec<_>>(), Some(&levels), None)
            }
            Column::Numbers(_, values) => {
                let present: Vec<i64> = values.iter().flatten().copied().collect();
                let levels = levels(values.iter().map(Option::is_some).collect());
                next.typed::<Int64Type>().write_batch(&present, Some(&levels), None)
            }
        }
        .expect("written");
        next.close().expect("closed");
    }
    group.close().expect("closed");
    writer.close().expect("closed");
    file
}

/// Two rows of PIQA, the second with these values.
fn piqa(sol2: Option<&str>, label: Option<i64>) -> Vec<u8> {
    parquet(&[
        Column::Texts("goal", vec![Some("the cat"), Some("a dog")]),
        Column::Texts("sol1", vec![Some("sat"), Some("ran")]),
        Column::Texts("sol2", vec![Some("a mat"), sol2]),
        Column::Numbers("label", vec![Some(0), label]),
    ])
}

/// Asks the task of the file, which must be refused with one error; returns its first line.
fn refused(file: &[u8]) -> String {
    let place = Place::new();
    fs::create_dir_all(place.path("tasks/piqa")).expect("made");
    fs::write(place.path("tasks/piqa/validation.parquet"), file).expect("written");
    let ran = place.run("eval m --tasks piqa --tasks-from tasks --seqlen 64 --use-cpu");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let errors = ran.stderr.lines().filter(|line| line.starts_with("error:"));
    assert_eq!(errors.count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint:") && !ran.stderr.contains("panicked"), "{}", ran.stderr);
    let first = ran.stderr.lines().next().expect("a message");
    assert!(first.contains("validation.parquet`"), "{first}");
    first.to_string()
}

#[test]
fn wrong_values_are_one_error_with_file_and_row() {
    let long = "x".repeat(2 << 20);
    for (file, why) in [
        (
            piqa(Some("far"), Some(2)),
            "row 1 (counted from 0): `label` is 2, and the choices are 0 to 1",
        ),
        (
            piqa(Some("far"), Some(i64::MIN)),
            "row 1 (counted from 0): `label` is -9223372036854775808",
        ),
        (piqa(Some("far"), None), "row 1 (counted from 0): `label` is null, not a whole number"),
        (piqa(None, Some(0)), "row 1 (counted from 0): `sol2` is null, not a text"),
        (
            piqa(Some(&long), Some(0)),
            "row 1 (counted from 0): it has 2.00 MiB, and 1.00 MiB is the limit",
        ),
        (
            parquet(&[Column::Texts("goal", vec![Some("the cat")])]),
            "row 0 (counted from 0): it has no `sol1`",
        ),
        (
            parquet(&[
                Column::Numbers("goal", vec![Some(1)]),
                Column::Texts("sol1", vec![Some("sat")]),
                Column::Texts("sol2", vec![Some("a mat")]),
                Column::Numbers("label", vec![Some(0)]),
            ]),
            "row 0 (counted from 0): `goal` is a number, not a text",
        ),
    ] {
        let first = refused(&file);
        assert!(first.contains(why), "{first}");
    }
}

#[test]
fn damaged_files_are_one_error_with_the_file() {
    let good = piqa(Some("far"), Some(0));
    for end in [0, 4, good.len() / 2, good.len() - 1] {
        refused(&good[..end]);
    }
    // Any byte of the footer and of the pages may have changed. Some changes leave values that are valid.
    let place = Place::new();
    fs::create_dir_all(place.path("tasks/piqa")).expect("made");
    for at in (4..good.len()).step_by(29) {
        let mut bad = good.clone();
        bad[at] ^= 0xff;
        fs::write(place.path("tasks/piqa/validation.parquet"), bad).expect("written");
        let ran = place.run("eval m --tasks piqa --tasks-from tasks --seqlen 64 --use-cpu");
        assert!([0, 1].contains(&ran.code), "byte {at}: {} {}", ran.code, ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "byte {at}: {}", ran.stderr);
    }
}
