//! The string column `text` of a parquet file, row by row: how the hub stores WikiText-2 and most document collections.
//!
//! The file is read without Arrow, one batch of one row group at a time, so memory does not grow with the file. Sizes that the
//! `parquet` crate trusts are checked first ([`parquet_shape`]), and a panic of the crate is reported as a damaged file.

use std::fmt::Display;
use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::file::properties::ReaderProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::serialized_reader::ReadOptionsBuilder;

use super::parquet_shape;
use super::text_file::open;
use super::unpacked::Unpacked;
use crate::failure::{Failure, blaming};
use crate::input::Expected;

/// The name of the column in every known dataset.
const COLUMN: &str = "text";
/// Rows per call of the decoder: enough to hide the cost of a call, few enough to hold in memory.
const BATCH: usize = 256;

/// Bytes of a row in addition to its text, once it is unpacked to a line.
const ROW: usize = r#"{"text":""}"#.len() + 1;
/// Columns that a message names at most.
const MOST_NAMED: usize = 20;

/// The remedy for a file that unpacks to too much.
pub(super) const WRITE_LINES: &str =
    "if it is meant, write its rows as JSON lines ({\"text\": ...}) and name that file";

/// A parquet file, opened with the checks of this room.
pub(super) struct ParquetFile<'a> {
    path: &'a Path,
    /// The size of the file.
    pub(super) bytes: u64,
    /// The same file, for the check of its pages.
    pages: File,
    pub(super) reader: SerializedFileReader<File>,
}

impl<'a> ParquetFile<'a> {
    /// Reads the file's footer. Fails when the file is not parquet, and when its footer announces what it does not hold.
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        let file = open(path, Expected::Parquet)?;
        let bytes =
            file.metadata().with_context(|| format!("cannot read `{}`", path.display()))?.len();
        parquet_shape::check_groups(&file).map_err(|why| damaged(path, &why))?;
        let pages = file.try_clone().context("cannot reopen an open file")?;
        let reader = blaming(library_panicked(path), || {
            // Without the forms of lz4 before parquet 2.9, which are unpacked without a limit.
            let properties = ReaderProperties::builder().set_backward_compatible_lz4(false);
            let options = ReadOptionsBuilder::new().with_reader_properties(properties.build());
            SerializedFileReader::new_with_options(file, options.build())
        })?
        .map_err(|error| damaged(path, &error))?;
        Ok(Self { path, bytes, pages, reader })
    }

    /// Checks the pages of a column in a row group before the crate reads them.
    pub(super) fn check_pages(&self, group: usize, column: usize) -> Result<(), Failure> {
        // `byte_range` panics on a negative place.
        let ((begin, length), packing) = blaming(library_panicked(self.path), || {
            let group = self.reader.metadata().row_group(group);
            let column = group.column(column);
            (column.byte_range(), column.compression())
        })?;
        parquet_shape::check_pages(&self.pages, begin, length, packing)
            .map_err(|why| damaged(self.path, &why))
    }

    /// The failure for a file that cannot be read.
    pub(super) fn damaged(&self, error: &dyn Display) -> Failure {
        damaged(self.path, error)
    }
}

/// The column `text` of a parquet file.
pub(super) struct TextColumn<'a> {
    file: ParquetFile<'a>,
    column: usize,
}

impl<'a> TextColumn<'a> {
    /// Reads the file's footer and finds the column.
    /// Fails when the file is not parquet, or has no string column `text`. The message names the columns.
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        let file = ParquetFile::open(path)?;
        let schema = file.reader.metadata().file_metadata().schema_descr_ptr();
        let is_text = |at: &usize| {
            let column = schema.column(*at);
            column.path().string() == COLUMN
                && column.physical_type() == Type::BYTE_ARRAY
                && column.max_rep_level() == 0
        };
        let Some(column) = (0..schema.num_columns()).find(is_text) else {
            let found = schema.columns().iter().take(MOST_NAMED);
            let found = found
                .map(|column| format!("{} ({})", column.path().string(), column.physical_type()));
            return Err(Failure::new(format!(
                "`{}` has no string column `{COLUMN}`",
                path.display()
            ))
            .detail(format!("columns found: {}", found.collect::<Vec<_>>().join(", ")))
            .hint(format!("rename the column that holds the text to `{COLUMN}`"))
            .into());
        };
        Ok(Self { file, column })
    }

    /// Gives every row to `take`, in the file's order.
    /// Fails when a row is null or not UTF-8, when the file is damaged or its compression is not supported, and when `take` fails.
    pub(super) fn for_each(&self, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let file = &self.file;
        let path = file.path;
        let mut unpacked = Unpacked::new(path, file.bytes, WRITE_LINES);
        let mut row = 0u64;
        for group in 0..file.reader.num_row_groups() {
            file.check_pages(group, self.column)?;
            let reader = blaming(library_panicked(path), || {
                file.reader
                    .get_row_group(group)
                    .and_then(|group| group.get_column_reader(self.column))
            })?;
            let ColumnReader::ByteArrayColumnReader(mut column) =
                reader.map_err(|error| damaged(path, &error))?
            else {
                return Err(Failure::new(format!(
                    "`{}`: column `{COLUMN}` changes its type",
                    path.display()
                ))
                .into());
            };
            let (mut levels, mut values) = (Vec::new(), Vec::<ByteArray>::new());
            loop {
                levels.clear();
                values.clear();
                let (records, present, _) = blaming(library_panicked(path), || {
                    column.read_records(BATCH, Some(&mut levels), None, &mut values)
                })?
                .map_err(|error| damaged(path, &error))?;
                if records == 0 {
                    break;
                }
                if present < records {
                    return Err(self.bad_row(row, records, "a row is null"));
                }
                for value in &values {
                    let text = std::str::from_utf8(value.data())
                        .map_err(|_| self.bad_row(row, 1, "a row is not UTF-8"))?;
                    unpacked.add((text.len() + ROW) as u64)?;
                    take(text)?;
                    row += 1;
                }
            }
        }
        Ok(())
    }

    /// The failure for an error within `count` rows from `row` on (counted from 0).
    fn bad_row(&self, row: u64, count: usize, what: &str) -> anyhow::Error {
        let place = if count == 1 {
            format!("row {row}")
        } else {
            format!("rows {row} to {}", row + count as u64 - 1)
        };
        Failure::new(format!("`{}`: {what} in column `{COLUMN}`", self.file.path.display()))
            .detail(format!("{place}, counted from 0"))
            .hint("drop such rows from the file")
            .into()
    }
}

fn damaged(path: &Path, error: &dyn Display) -> Failure {
    Failure::new(format!(
        "cannot read `{}` as parquet: {error}",
        path.display()
    ))
    .hint("copy the file again; columns may be uncompressed, or packed by snappy, zstd, gzip, lz4 or brotli")
}

fn library_panicked(path: &Path) -> Failure {
    damaged(path, &"the parquet library failed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::{write_nullable_parquet, write_packed_parquet, write_parquet};

    #[test]
    fn rows_come_in_order_across_row_groups_and_batches() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("x.parquet");
        let rows: Vec<String> = (0..700)
            .map(|row| if row % 7 == 0 { String::new() } else { format!("row {row}\n") })
            .collect();
        write_parquet(&path, "text", &[&rows[..600], &rows[600..]]);
        let mut read = Vec::new();
        let column = TextColumn::open(&path).expect("open");
        column
            .for_each(&mut |row| {
                read.push(row.to_owned());
                Ok(())
            })
            .expect("read");
        assert_eq!(read, rows);
    }

    #[test]
    fn every_codec_that_the_docs_name_is_read() {
        use parquet::basic::Compression;

        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("x.parquet");
        let rows: Vec<String> = (0..500).map(|row| format!("row {row} of a text")).collect();
        let group = vec![rows.iter().map(|row| Some(row.as_str())).collect()];
        for packing in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::ZSTD(Default::default()),
            Compression::GZIP(Default::default()),
            Compression::BROTLI(Default::default()),
            Compression::LZ4,
            Compression::LZ4_RAW,
        ] {
            write_packed_parquet(&path, "text", &group, packing);
            let mut read = Vec::new();
            let column = TextColumn::open(&path).expect("open");
            let take = &mut |row: &str| {
                read.push(row.to_owned());
                Ok(())
            };
            column.for_each(take).expect("read");
            assert_eq!(read, rows, "{packing}");
        }
    }

    #[test]
    fn a_missing_column_names_those_that_are_there() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("x.parquet");
        write_parquet(&path, "content", &[&["a".to_owned()]]);
        let error = TextColumn::open(&path).err().expect("must fail").to_string();
        assert!(error.contains("content (BYTE_ARRAY)"), "{error}");
        std::fs::write(&path, "PAR1 but no more").expect("write");
        assert!(
            TextColumn::open(&path).err().expect("must fail").to_string().contains("as parquet")
        );
    }

    #[test]
    fn a_null_row_is_refused_with_its_place() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("x.parquet");
        write_nullable_parquet(&path, "text", &[vec![Some("a")], vec![Some("b"), None]]);
        let column = TextColumn::open(&path).expect("open");
        let error = column.for_each(&mut |_| Ok(())).expect_err("must fail").to_string();
        assert!(error.contains("a row is null") && error.contains("rows 1 to 2"), "{error}");
    }
}
