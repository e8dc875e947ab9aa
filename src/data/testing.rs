//! Shared parts of this room's tests: the reference's files if they exist, recorded events, parquet fixtures.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::run::{Event, Events};

/// A file or folder of the shared reference data: below `$PRUNE_SHARED`, else below `shared` next to the repository. If it is
/// absent, prints a line and returns `None`.
#[expect(clippy::print_stderr, reason = "a skipped test must say so")]
pub(super) fn shared(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join("shared");
    let path = std::env::var_os("PRUNE_SHARED").map_or_else(beside, PathBuf::from).join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: `{}` is not there (set PRUNE_SHARED)", path.display());
    None
}

/// Keeps every event.
#[derive(Default)]
pub(super) struct RecordedEvents(Mutex<Vec<Event>>);

impl Events for RecordedEvents {
    fn emit(&self, event: Event) {
        self.0.lock().expect("no test panics while it emits").push(event);
    }
}

impl RecordedEvents {
    /// Number of notes, details and warnings that contain a text.
    pub(super) fn count(&self, text: &str) -> usize {
        let events = self.0.lock().expect("no test panics while it emits");
        events.iter().filter(|event| matches!(event, Event::Note { text: line } | Event::Detail { text: line } | Event::Warning { text: line } if line.contains(text))).count()
    }
}

impl RecordedEvents {
    /// The announced steps of a phase, and its reports of progress.
    pub(super) fn progress(&self, name: &str, counted: &str) -> (u64, Vec<u64>) {
        let events = self.0.lock().expect("no test panics while it emits");
        let mut of_phase = events.iter().skip_while(
            |event| !matches!(event, Event::PhaseStarted { phase, unit, .. } if phase == name && *unit == counted),
        );
        let Some(Event::PhaseStarted { steps, .. }) = of_phase.next() else {
            return (0, Vec::new());
        };
        let done = of_phase.map_while(|event| match event {
            Event::Progress { done } => Some(*done),
            _ => None,
        });
        (*steps, done.collect())
    }
}

/// Writes a parquet file with a string column in the hub's form: nullable, compressed by snappy; a row group per slice.
pub(super) fn write_parquet(path: &Path, column: &str, groups: &[&[String]]) {
    let groups: Vec<Vec<Option<&str>>> =
        groups.iter().map(|rows| rows.iter().map(|row| Some(row.as_str())).collect()).collect();
    write_nullable_parquet(path, column, &groups);
}

/// Writes such a file with rows that may be null.
pub(super) fn write_nullable_parquet(path: &Path, column: &str, groups: &[Vec<Option<&str>>]) {
    write_packed_parquet(path, column, groups, Compression::SNAPPY);
}

/// Writes such a file with the codec `packing`.
pub(super) fn write_packed_parquet(
    path: &Path,
    column: &str,
    groups: &[Vec<Option<&str>>],
    packing: Compression,
) {
    let schema = format!("message rows {{ optional int64 id; optional binary {column} (UTF8); }}");
    let schema = Arc::new(parse_message_type(&schema).expect("a schema"));
    let file = File::create(path).expect("create");
    let properties = WriterProperties::builder().set_compression(packing);
    let mut writer =
        SerializedFileWriter::new(file, schema, Arc::new(properties.build())).expect("a writer");
    for rows in groups {
        let present: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        let values: Vec<ByteArray> =
            rows.iter().flatten().map(|row| ByteArray::from(*row)).collect();
        let mut group = writer.next_row_group().expect("a row group");
        let mut column = group.next_column().expect("a column").expect("the first column");
        let everywhere = vec![1; rows.len()];
        column.typed::<Int64Type>().write_batch(&ids, Some(&everywhere), None).expect("write");
        column.close().expect("close");
        let mut column = group.next_column().expect("a column").expect("the second column");
        column.typed::<ByteArrayType>().write_batch(&values, Some(&present), None).expect("write");
        column.close().expect("close");
        group.close().expect("close");
    }
    writer.close().expect("close");
}
