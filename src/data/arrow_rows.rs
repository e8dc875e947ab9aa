//! The rows of an Arrow stream or file as documents. The `datasets` library saves data sets and keeps its cache as streams.
//!
//! The `arrow-ipc` crate checks offsets, lengths and UTF-8 of what it reads. A panic of the crate is reported as a damaged file.

use std::fmt::Display;
use std::io::BufReader;
use std::path::Path;

use anyhow::Result;
use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Schema};
use serde_json::Number;

use super::document::{DocumentShape, FIELDS};
use super::ordered_json::OrderedJson;
use super::parquet_text::WRITE_LINES;
use super::row_lines::{unknown_columns, write_line};
use super::stored_form::Format;
use super::text_file::open;
use super::unpacked::Unpacked;
use crate::failure::{Failure, blaming};
use crate::input::Expected;

/// Batches in the order of the file.
type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>>>;

/// Gives every row to `take`, as a line of JSON, in the file's order. `take` returns false for enough.
/// Fails when the columns make no document, when the file is damaged, and when `take` fails.
pub(super) fn for_each(
    path: &Path,
    format: Format,
    take: &mut dyn FnMut(&[u8]) -> Result<bool>,
) -> Result<()> {
    let columns = {
        let (schema, _) = batches(path, format, None)?;
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        if DocumentShape::of(|name| names.contains(&name)).is_none() {
            return Err(unknown_columns(path, &names).into());
        }
        let columns = names.iter().enumerate().filter(|(_, name)| FIELDS.contains(name));
        columns.map(|(column, _)| column).collect::<Vec<_>>()
    };
    let (_, mut batches) = batches(path, format, Some(columns))?;
    let file = std::fs::metadata(path)?.len();
    let mut unpacked = Unpacked::new(path, file, WRITE_LINES);
    while let Some(batch) = blaming(damaged(path, &FAILED), || batches.next())? {
        let batch = batch.map_err(|error| damaged(path, &error))?;
        let schema = batch.schema();
        for row in 0..batch.num_rows() {
            let mut fields = Vec::with_capacity(batch.num_columns());
            for (field, column) in schema.fields().iter().zip(batch.columns()) {
                let value = json(column, row).map_err(|why| damaged(path, &why))?;
                fields.push((field.name().clone(), value));
            }
            let line = write_line(&OrderedJson::Object(fields))?;
            unpacked.add(line.len() as u64)?;
            if !take(&line)? {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Gives the strings of the column `text` to `take`, in the file's order: the rows of WikiText-2.
/// Fails as [`for_each`], and for a row without a string.
pub(super) fn for_each_text(
    path: &Path,
    format: Format,
    take: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    for_each(path, format, &mut |line| {
        let row = OrderedJson::parse(line)?;
        let text = row.get("text").and_then(OrderedJson::as_text);
        take(text.ok_or_else(|| damaged(path, &"a row of the column `text` is null"))?)?;
        Ok(true)
    })
}

const FAILED: &str = "the Arrow library failed";

/// Opens a file, with all columns or with some.
fn batches(path: &Path, format: Format, columns: Option<Vec<usize>>) -> Result<(Schema, Batches)> {
    let file = BufReader::new(open(path, Expected::Documents)?);
    let opened = blaming(damaged(path, &FAILED), || -> Result<(Schema, Batches), ArrowError> {
        Ok(match format {
            Format::ArrowFile => {
                let reader = FileReader::try_new(file, columns)?;
                (reader.schema().as_ref().clone(), Box::new(reader))
            }
            _ => {
                let reader = StreamReader::try_new(file, columns)?;
                (reader.schema().as_ref().clone(), Box::new(reader))
            }
        })
    })?;
    Ok(opened.map_err(|error| damaged(path, &error))?)
}

fn damaged(path: &Path, error: &dyn Display) -> Failure {
    Failure::new(format!("cannot read `{}` as Arrow: {error}", path.display())).hint(format!(
        "copy the file again, or write it as parquet: python -c \"from datasets import Dataset; Dataset.from_file('{}').to_parquet('{}')\"",
        path.display(),
        path.with_extension("parquet").display()
    ))
}

/// A value of a column. Null fields of inner groups are left out: a group has every field in every row.
fn json(column: &dyn Array, row: usize) -> Result<OrderedJson, String> {
    if column.is_null(row) {
        return Ok(OrderedJson::Null);
    }
    let float = |value: f64| Number::from_f64(value).map_or(OrderedJson::Null, OrderedJson::Number);
    let entries = |list: &dyn Array| {
        let entries = (0..list.len()).map(|row| json(list, row));
        entries.collect::<Result<Vec<_>, _>>().map(OrderedJson::List)
    };
    Ok(match column.data_type() {
        DataType::Null => OrderedJson::Null,
        DataType::Boolean => OrderedJson::Bool(column.as_boolean().value(row)),
        DataType::Int8 => OrderedJson::Number(column.as_primitive::<Int8Type>().value(row).into()),
        DataType::Int16 => {
            OrderedJson::Number(column.as_primitive::<Int16Type>().value(row).into())
        }
        DataType::Int32 => {
            OrderedJson::Number(column.as_primitive::<Int32Type>().value(row).into())
        }
        DataType::Int64 => {
            OrderedJson::Number(column.as_primitive::<Int64Type>().value(row).into())
        }
        DataType::UInt8 => {
            OrderedJson::Number(column.as_primitive::<UInt8Type>().value(row).into())
        }
        DataType::UInt16 => {
            OrderedJson::Number(column.as_primitive::<UInt16Type>().value(row).into())
        }
        DataType::UInt32 => {
            OrderedJson::Number(column.as_primitive::<UInt32Type>().value(row).into())
        }
        DataType::UInt64 => {
            OrderedJson::Number(column.as_primitive::<UInt64Type>().value(row).into())
        }
        DataType::Float32 => float(column.as_primitive::<Float32Type>().value(row).into()),
        DataType::Float64 => float(column.as_primitive::<Float64Type>().value(row)),
        DataType::Utf8 => OrderedJson::from(column.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => OrderedJson::from(column.as_string::<i64>().value(row)),
        DataType::Utf8View => OrderedJson::from(column.as_string_view().value(row)),
        DataType::List(_) => entries(&column.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => entries(&column.as_list::<i64>().value(row))?,
        DataType::FixedSizeList(..) => entries(&column.as_fixed_size_list().value(row))?,
        DataType::Struct(fields) => {
            let group = column.as_struct();
            let mut object = Vec::with_capacity(fields.len());
            for (field, column) in fields.iter().zip(group.columns()) {
                match json(column, row)? {
                    OrderedJson::Null => {}
                    value => object.push((field.name().clone(), value)),
                }
            }
            OrderedJson::Object(object)
        }
        other => return Err(format!("a column has the type {other}, which no text has")),
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;
    use std::sync::Arc;

    use arrow_array::builder::{Int64Builder, ListBuilder, StringBuilder, StructBuilder};
    use arrow_ipc::writer::{FileWriter, StreamWriter};
    use arrow_schema::Field;

    use super::*;

    /// Two rows, of which the first is a conversation and the second is null, in the columns `id`, `messages` and `text`.
    fn batch() -> RecordBatch {
        let fields = ["role", "content", "tool_calls"];
        let fields = fields.map(|name| Field::new(name, DataType::Utf8, true));
        let builders = (0..3).map(|_| Box::new(StringBuilder::new()) as Box<_>).collect();
        let mut messages = ListBuilder::new(StructBuilder::new(fields.to_vec(), builders));
        for (role, content) in [("user", "Hé?"), ("assistant", "Ho.")] {
            let message = messages.values();
            for (at, value) in [Some(role), Some(content), None].into_iter().enumerate() {
                let field = message.field_builder::<StringBuilder>(at).unwrap();
                field.append_option(value);
            }
            message.append(true);
        }
        messages.append(true);
        messages.append(false);
        let (mut ids, mut text) = (Int64Builder::new(), StringBuilder::new());
        ids.append_slice(&[1, 2]);
        text.append_null();
        text.append_null();
        let columns: [(&str, Arc<dyn Array>); 3] = [
            ("id", Arc::new(ids.finish())),
            ("messages", Arc::new(messages.finish())),
            ("text", Arc::new(text.finish())),
        ];
        RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true)))
            .unwrap()
    }

    fn written(folder: &Path) -> [(PathBuf, Format); 2] {
        let batch = batch();
        let paths = ["saved.arrow", "file.arrow"].map(|name| folder.join(name));
        let stream = File::create(&paths[0]).unwrap();
        let mut stream = StreamWriter::try_new(stream, &batch.schema()).unwrap();
        stream.write(&batch).unwrap();
        stream.finish().unwrap();
        let file = File::create(&paths[1]).unwrap();
        let mut file = FileWriter::try_new(file, &batch.schema()).unwrap();
        file.write(&batch).unwrap();
        file.finish().unwrap();
        let [stream, file] = paths;
        [(stream, Format::ArrowStream), (file, Format::ArrowFile)]
    }

    fn rows(path: &Path) -> Result<Vec<String>> {
        let mut rows = Vec::new();
        for_each(path, Format::of(path, Expected::Documents)?, &mut |line| {
            rows.push(String::from_utf8(line.to_vec())?);
            Ok(true)
        })?;
        Ok(rows)
    }

    #[test]
    fn rows_of_streams_and_files_are_lines_without_the_null_fields_of_groups() {
        let folder = tempfile::tempdir().unwrap();
        for (path, format) in written(folder.path()) {
            assert_eq!(Format::of(&path, Expected::Documents).unwrap(), format);
            assert_eq!(
                rows(&path).unwrap(),
                [
                    "{\"messages\":[{\"role\":\"user\",\"content\":\"Hé?\"},{\"role\":\"assistant\",\"content\":\"Ho.\"}],\"text\":null}\n",
                    "{\"messages\":null,\"text\":null}\n"
                ]
            );
        }
    }

    #[test]
    fn rows_of_wikitext_come_as_strings_and_a_null_row_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wikitext-test.arrow");
        let write = |last: Option<&str>| {
            let mut text = StringBuilder::new();
            text.append_value("");
            text.append_value(" = A = \n");
            text.append_option(last);
            let column: Arc<dyn Array> = Arc::new(text.finish());
            let batch = RecordBatch::try_from_iter_with_nullable([("text", column, true)]).unwrap();
            let stream = File::create(&path).unwrap();
            let mut stream = StreamWriter::try_new(stream, &batch.schema()).unwrap();
            stream.write(&batch).unwrap();
            stream.finish().unwrap();
        };
        let read = || {
            let mut rows = Vec::new();
            for_each_text(&path, Format::ArrowStream, &mut |row| {
                rows.push(row.to_owned());
                Ok(())
            })
            .map(|()| rows)
        };
        write(Some("b"));
        assert_eq!(read().unwrap(), ["", " = A = \n", "b"]);
        write(None);
        assert!(read().unwrap_err().to_string().contains("is null"));
    }

    #[test]
    fn cut_and_changed_files_are_refused_and_never_panic() {
        let folder = tempfile::tempdir().unwrap();
        for (path, _) in written(folder.path()) {
            let good = std::fs::read(&path).unwrap();
            let mut refused = 0;
            for at in (8..good.len()).step_by(5) {
                let mut changed = good.clone();
                changed[at] ^= 0xff;
                for bytes in [&good[..at], &changed] {
                    std::fs::write(&path, bytes).unwrap();
                    let Err(error) = rows(&path) else { continue };
                    refused += 1;
                    assert!(error.is::<Failure>(), "byte {at}: {error}");
                }
            }
            assert!(refused > 50, "{refused}");
        }
    }
}
