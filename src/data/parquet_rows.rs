//! The rows of a parquet file as documents: the columns that documents are made of, nested ones too, each row a JSON object.
//!
//! The file is read without Arrow, one row group at a time. [`TextColumn`](super::parquet_text::TextColumn) opens files and explains the checks
//! that are made before the `parquet` crate reads a page.

use std::path::Path;

use anyhow::Result;
use parquet::file::reader::FileReader;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::Number;

use super::document::{DocumentShape, FIELDS};
use super::ordered_json::OrderedJson;
use super::parquet_text::{ParquetFile, WRITE_LINES};
use super::row_lines::{unknown_columns, write_line};
use super::unpacked::Unpacked;
use crate::failure::blaming;

/// Gives every row to `take`, as a line of JSON, in the file's order. `take` returns false for enough.
/// Fails when the columns make no document, when the file is damaged or its compression is not supported, and when `take` fails.
pub(super) fn for_each(path: &Path, take: &mut dyn FnMut(&[u8]) -> Result<bool>) -> Result<()> {
    let file = ParquetFile::open(path)?;
    let schema = file.reader.metadata().file_metadata().schema_descr_ptr();
    let roots = schema.root_schema().get_fields();
    let known: Vec<_> =
        roots.iter().filter(|root| FIELDS.contains(&root.name())).cloned().collect();
    if DocumentShape::of(|name| known.iter().any(|root| root.name() == name)).is_none() {
        let names: Vec<&str> = roots.iter().map(|root| root.name()).collect();
        return Err(unknown_columns(path, &names).into());
    }
    let columns: Vec<usize> = (0..schema.num_columns())
        .filter(|column| FIELDS.contains(&schema.get_column_root(*column).name()))
        .collect();
    let name = schema.root_schema().name();
    let projection = Type::group_type_builder(name).with_fields(known).build();
    let projection = projection.map_err(|error| file.damaged(&error))?;
    let mut unpacked = Unpacked::new(path, file.bytes, WRITE_LINES);
    file.for_each_row(Some((projection, &columns)), &mut |row| {
        let line = write_line(&object(&row, true).map_err(|why| file.damaged(&why))?)?;
        unpacked.add(line.len() as u64)?;
        take(&line)
    })
}

impl ParquetFile<'_> {
    /// Gives every row to `take`, in the file's order; of some columns if a schema and the numbers of its columns are given. `take` returns
    /// false for enough.
    pub(super) fn for_each_row(
        &self,
        columns: Option<(Type, &[usize])>,
        take: &mut dyn FnMut(Row) -> Result<bool>,
    ) -> Result<()> {
        let (projection, columns) = columns.unzip();
        let all = self.reader.metadata().file_metadata().schema_descr().num_columns();
        let all: Vec<usize> = (0..all).collect();
        for group in 0..self.reader.num_row_groups() {
            for &column in columns.unwrap_or(&all) {
                self.check_pages(group, column)?;
            }
            let panicked = || self.damaged(&"the parquet library failed");
            let reader = blaming(panicked(), || self.reader.get_row_group(group))?;
            let reader = reader.map_err(|error| self.damaged(&error))?;
            let rows = blaming(panicked(), || reader.get_row_iter(projection.clone()))?;
            let mut rows = rows.map_err(|error| self.damaged(&error))?;
            while let Some(row) = blaming(panicked(), || rows.next())? {
                if !take(row.map_err(|error| self.damaged(&error))?)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// A row as an object. Null fields of inner groups are left out: a group of columns has every field in every row.
pub(super) fn object(row: &Row, keeps_null: bool) -> Result<OrderedJson, String> {
    let mut fields = Vec::with_capacity(row.len());
    for (name, field) in row.get_column_iter() {
        match json(field)? {
            OrderedJson::Null if !keeps_null => {}
            value => fields.push((name.clone(), value)),
        }
    }
    Ok(OrderedJson::Object(fields))
}

fn json(field: &Field) -> Result<OrderedJson, String> {
    let float = |value: f64| Number::from_f64(value).map_or(OrderedJson::Null, OrderedJson::Number);
    Ok(match field {
        Field::Null => OrderedJson::Null,
        Field::Bool(value) => OrderedJson::Bool(*value),
        Field::Byte(value) => OrderedJson::Number((*value).into()),
        Field::Short(value) => OrderedJson::Number((*value).into()),
        Field::Int(value) => OrderedJson::Number((*value).into()),
        Field::Long(value) => OrderedJson::Number((*value).into()),
        Field::UByte(value) => OrderedJson::Number((*value).into()),
        Field::UShort(value) => OrderedJson::Number((*value).into()),
        Field::UInt(value) => OrderedJson::Number((*value).into()),
        Field::ULong(value) => OrderedJson::Number((*value).into()),
        Field::Float(value) => float((*value).into()),
        Field::Double(value) => float(*value),
        Field::Str(text) => OrderedJson::Text(text.clone()),
        Field::Bytes(bytes) => {
            let text = std::str::from_utf8(bytes.data());
            OrderedJson::from(text.map_err(|_| "a string is not UTF-8")?)
        }
        Field::Group(row) => object(row, false)?,
        Field::ListInternal(list) => {
            OrderedJson::List(list.elements().iter().map(json).collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut fields = Vec::new();
            for (key, value) in map.entries() {
                match json(key)? {
                    OrderedJson::Text(key) => fields.push((key, json(value)?)),
                    key => return Err(format!("the key of a map is {}", key.kind())),
                }
            }
            OrderedJson::Object(fields)
        }
        other => OrderedJson::Text(other.to_string()),
    })
}
