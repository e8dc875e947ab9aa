//! What a parquet file says about itself, looked at before its reader believes it.
//!
//! The reader allocates what counts in the file announce: children of a group, values of a dictionary, bytes of a page; and it
//! follows groups within groups as deep as they go. Here these numbers are held against the bytes that are there: one walk over
//! the footer, and one over the headers of a column's pages.
//!
//! Both are structures of Thrift's compact protocol: fields by id, each with a type; numbers in groups of seven bits; lists with
//! their size; byte strings with their length. Ids are those of `parquet.thrift` of the parquet-format project.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use crate::bytes::ByteSize;

/// What stands at both ends of a file.
const MAGIC: [u8; 4] = *b"PAR1";
/// The largest footer that is read. One has some hundred bytes per column and row group.
const LARGEST_FOOTER: u64 = 64 << 20;
/// The largest header of a page, which may quote its smallest and its largest value.
const LARGEST_PAGE_HEADER: u64 = 1 << 20;
/// The largest page that is unpacked. Writers close a page at about 1 MiB, but a value is never split.
const LARGEST_PAGE: i64 = 256 << 20;
/// Structures within one another, of which a footer has six levels.
const DEEPEST: usize = 32;
/// Groups of columns within one another.
const DEEPEST_GROUP: usize = 64;

/// Why a file is refused, in words.
type Refusal = String;

/// Holds what the footer of `file` and the pages of the column `name` announce against the file.
///
/// # Errors
///
/// Fails when something is announced that cannot be there, or is larger than what anybody writes, and when reading fails.
pub(super) fn check(mut file: &File, name: &str) -> Result<(), Refusal> {
    let unreadable = |error: io::Error| error.to_string();
    let file_bytes = file.metadata().map_err(unreadable)?.len();
    let mut tail = [0; 8];
    let Some(before_tail) = file_bytes
        .checked_sub(tail.len() as u64)
        .filter(|&bytes| bytes >= MAGIC.len() as u64)
    else {
        return Err(format!("{file_bytes} bytes are too few"));
    };
    file.seek(SeekFrom::Start(before_tail))
        .and_then(|_| file.read_exact(&mut tail))
        .map_err(unreadable)?;
    let [a, b, c, d, magic @ ..] = tail;
    let footer_bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
    if magic != MAGIC {
        return Err("it does not end as parquet does: it is truncated, or something else".into());
    }
    if footer_bytes > before_tail || footer_bytes > LARGEST_FOOTER {
        return Err(format!(
            "its footer is said to have {footer_bytes} bytes, of {before_tail} before it"
        ));
    }
    let footer = read_at(file, before_tail - footer_bytes, footer_bytes).map_err(unreadable)?;
    let chunks = chunks_of(&footer, name)?;
    for chunk in chunks {
        check_pages(file, file_bytes, chunk)?;
    }
    Ok(())
}

/// Where the pages of one column in one row group lie.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk {
    /// First byte of the data pages.
    data: i64,
    /// First byte of the dictionary, which comes before them where there is one.
    dictionary: Option<i64>,
    /// Bytes of all.
    bytes: i64,
    /// Parts of the column's path, and how many of them are the name that is wanted.
    path: (usize, usize),
}

/// Checks a footer, and finds the chunks of a column.
fn chunks_of(footer: &[u8], name: &str) -> Result<Vec<Chunk>, Refusal> {
    // FileMetaData: 2 schema [SchemaElement: 5 num_children], 4 row_groups [RowGroup: 1 columns [ColumnChunk: 3 meta_data]].
    // ColumnMetaData: 3 path_in_schema, 7 total_compressed_size, 9 data_page_offset, 11 dictionary_page_offset.
    let (mut children, mut chunks) = (Vec::new(), Vec::<Chunk>::new());
    Walk::over(footer, &mut |path, found| match (path, found) {
        ([2], Found::Struct) => children.push(0),
        ([4, 1, 3], Found::Struct) => chunks.push(Chunk::default()),
        ([2, 5], Found::Number(number)) => {
            if let Some(last) = children.last_mut() {
                *last = number;
            }
        }
        ([4, 1, 3, field], found) => {
            let Some(chunk) = chunks.last_mut() else {
                return;
            };
            match (field, found) {
                (3, Found::Bytes(part)) => {
                    chunk.path.0 += 1;
                    chunk.path.1 += usize::from(part == name.as_bytes());
                }
                (7, Found::Number(bytes)) => chunk.bytes = bytes,
                (9, Found::Number(offset)) => chunk.data = offset,
                (11, Found::Number(offset)) => chunk.dictionary = Some(offset),
                _ => {}
            }
        }
        _ => {}
    })?;
    check_groups(&children)?;
    chunks.retain(|chunk| chunk.path == (1, 1));
    Ok(chunks)
}

/// The schema is a tree, written as the number of children of each element, parents first.
fn check_groups(children: &[i64]) -> Result<(), Refusal> {
    // Children still to come, of each group that is open.
    let mut open: Vec<i64> = Vec::new();
    for (at, &count) in children.iter().enumerate() {
        if count < 0 || count > (children.len() - at) as i64 {
            return Err(format!(
                "a group of columns is said to have {count} members"
            ));
        }
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if count > 0 {
            open.push(count);
        }
        if open.len() > DEEPEST_GROUP {
            return Err(format!(
                "more than {DEEPEST_GROUP} groups of columns lie within one another"
            ));
        }
    }
    Ok(())
}

/// Checks the pages of a chunk, header by header.
fn check_pages(file: &File, file_bytes: u64, chunk: Chunk) -> Result<(), Refusal> {
    let begin = chunk.dictionary.unwrap_or(chunk.data);
    let end = begin.checked_add(chunk.bytes);
    let (Ok(mut at), Some(Ok(end))) = (u64::try_from(begin), end.map(u64::try_from)) else {
        return Err("a column's place in it is negative".into());
    };
    if end > file_bytes || chunk.bytes < 0 {
        return Err(format!(
            "a column reaches to byte {end}, the file has {file_bytes}"
        ));
    }
    while at < end {
        let (header, page) = page_at(file, at, end)?;
        let PageHeader {
            unpacked,
            packed,
            dictionary_values,
        } = page;
        let next = u64::try_from(packed)
            .ok()
            .and_then(|packed| at.checked_add(header)?.checked_add(packed));
        let Some(next) = next.filter(|&next| next <= end) else {
            return Err(format!(
                "a page at byte {at} is said to have {packed} bytes, its column ends at byte {end}"
            ));
        };
        if !(0..=LARGEST_PAGE).contains(&unpacked) {
            return Err(format!(
                "a page at byte {at} is said to unpack to {unpacked} bytes, at most {} are unpacked",
                ByteSize(LARGEST_PAGE as u64)
            ));
        }
        // Every value of a dictionary of strings has at least its length, in four bytes.
        if !(0..=unpacked / 4).contains(&dictionary_values) {
            return Err(format!(
                "a dictionary of {unpacked} bytes is said to have {dictionary_values} values"
            ));
        }
        at = next;
    }
    Ok(())
}

/// What the header of a page announces.
#[derive(Debug, Clone, Copy, Default)]
struct PageHeader {
    unpacked: i64,
    packed: i64,
    dictionary_values: i64,
}

/// The length of the header at byte `at`, and what it announces.
fn page_at(file: &File, at: u64, end: u64) -> Result<(u64, PageHeader), Refusal> {
    let mut room: u64 = 1 << 10;
    loop {
        let bytes =
            read_at(file, at, room.min(end - at)).map_err(|error: io::Error| error.to_string())?;
        let mut page = PageHeader::default();
        // PageHeader: 2 uncompressed_page_size, 3 compressed_page_size, 7 dictionary_page_header [1 num_values].
        let walked = Walk::over(&bytes, &mut |path, found| match (path, found) {
            ([2], Found::Number(number)) => page.unpacked = number,
            ([3], Found::Number(number)) => page.packed = number,
            ([7, 1], Found::Number(number)) => page.dictionary_values = number,
            _ => {}
        });
        match walked {
            Ok(length) => return Ok((length as u64, page)),
            Err(_) if room < LARGEST_PAGE_HEADER.min(end - at) => room *= 16,
            Err(why) => return Err(format!("the header of a page at byte {at}: {why}")),
        }
    }
}

/// Reads `length` bytes of a file from byte `at` on; all of them are there.
fn read_at(mut file: &File, at: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What is found at a path of field ids.
enum Found<'a> {
    /// A structure begins.
    Struct,
    /// An integer.
    Number(i64),
    /// A byte string.
    Bytes(&'a [u8]),
}

/// A walk over one structure, which checks that everything announced is there.
struct Walk<'a, 'w> {
    bytes: &'a [u8],
    at: usize,
    path: Vec<i16>,
    tell: &'w mut dyn FnMut(&[i16], Found<'a>),
}

impl<'a, 'w> Walk<'a, 'w> {
    /// Walks over the structure at the beginning of `bytes`, and returns its length. Members of a list have the list's path.
    fn over(bytes: &'a [u8], tell: &'w mut dyn FnMut(&[i16], Found<'a>)) -> Result<usize, Refusal> {
        let mut walk = Self {
            bytes,
            at: 0,
            path: Vec::new(),
            tell,
        };
        walk.structure(0)?;
        Ok(walk.at)
    }

    /// A structure: fields, each with a step from the id before it, up to a zero.
    fn structure(&mut self, depth: usize) -> Result<(), Refusal> {
        if depth > DEEPEST {
            return Err(format!(
                "more than {DEEPEST} structures lie within one another"
            ));
        }
        let mut id = 0i16;
        loop {
            let head = self.byte()?;
            let kind = head & 0x0f;
            if kind == 0 {
                return Ok(());
            }
            id = match head >> 4 {
                0 => i16::try_from(self.zigzag()?).map_err(|_| "a field's id is no id")?,
                step => id.checked_add(step.into()).ok_or("a field's id is no id")?,
            };
            self.path.push(id);
            // A boolean field is all in its type.
            if !matches!(kind, 1 | 2) {
                self.value(kind, depth)?;
            }
            self.path.pop();
        }
    }

    /// One value of a type.
    fn value(&mut self, kind: u8, depth: usize) -> Result<(), Refusal> {
        if depth > DEEPEST {
            return Err(format!("more than {DEEPEST} lists lie within one another"));
        }
        match kind {
            // As a member of a list, a boolean takes a byte.
            1..=3 => drop(self.byte()?),
            4..=6 => {
                let number = self.zigzag()?;
                (self.tell)(&self.path, Found::Number(number));
            }
            7 => drop(self.take(8)?),
            8 => {
                let length = self.varint()?;
                let bytes = self.take(length)?;
                (self.tell)(&self.path, Found::Bytes(bytes));
            }
            9 | 10 => {
                let head = self.byte()?;
                let count = match head >> 4 {
                    15 => self.varint()?,
                    count => count.into(),
                };
                self.check_count(count)?;
                for _ in 0..count {
                    self.value(head & 0x0f, depth + 1)?;
                }
            }
            11 => {
                let count = self.varint()?;
                self.check_count(count)?;
                let kinds = if count > 0 { self.byte()? } else { 0 };
                for _ in 0..count {
                    self.value(kinds >> 4, depth + 1)?;
                    self.value(kinds & 0x0f, depth + 1)?;
                }
            }
            12 => {
                (self.tell)(&self.path, Found::Struct);
                self.structure(depth + 1)?;
            }
            _ => return Err(format!("a value has the type {kind}, which there is not")),
        }
        Ok(())
    }

    /// Every member of a list takes a byte at least.
    fn check_count(&self, count: u64) -> Result<(), Refusal> {
        let left = self.bytes.len() - self.at;
        if count > left as u64 {
            return Err(format!(
                "a list is said to have {count} members, {left} bytes follow"
            ));
        }
        Ok(())
    }

    fn byte(&mut self) -> Result<u8, Refusal> {
        match *self.take(1)? {
            [byte] => Ok(byte),
            _ => Err("it breaks off".into()),
        }
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], Refusal> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let taken = rest.get(..length).ok_or_else(|| {
            format!(
                "it breaks off: {length} bytes are announced, {} follow",
                rest.len()
            )
        })?;
        self.at += length;
        Ok(taken)
    }

    /// Seven bits a byte, lowest first; the eighth says that another follows.
    fn varint(&mut self) -> Result<u64, Refusal> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err("a number has more than 64 bits".into())
    }

    /// 0, −1, 1, −2, …
    fn zigzag(&mut self) -> Result<i64, Refusal> {
        let number = self.varint()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(bytes: &[u8]) -> Result<Vec<(Vec<i16>, i64)>, Refusal> {
        let mut numbers = Vec::new();
        Walk::over(bytes, &mut |path, found| {
            if let Found::Number(number) = found {
                numbers.push((path.to_vec(), number));
            }
        })?;
        Ok(numbers)
    }

    #[test]
    fn numbers_are_found_by_their_path() {
        // Field 1: i32 −2. Field 3: list of two structures, each with field 2: i64 150 (two bytes of varint: 300).
        let bytes = [0x15, 3, 0x29, 0x2c, 0x26, 0xac, 2, 0, 0x26, 0xac, 2, 0, 0];
        let of_list = (vec![3, 2], 150);
        assert_eq!(
            walk(&bytes),
            Ok(vec![(vec![1], -2), of_list.clone(), of_list])
        );
        for cut in 0..bytes.len() {
            assert!(walk(&bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn what_is_announced_and_not_there_is_refused() {
        for (bytes, why) in [
            (&[0x18, 9, 1][..], "9 bytes are announced, 1 follow"),
            (
                &[0x19, 0xf5, 0xff, 0x7f, 1],
                "a list is said to have 16383 members",
            ),
            (&[0x1b, 200, 1, 0x55], "a list is said to have 200 members"),
            (&[0x1d, 0], "the type 13"),
            (
                &[0x15, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255],
                "more than 64 bits",
            ),
        ] {
            let refused = walk(bytes).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        // A structure in a structure in a structure …
        assert!(
            walk(&[0x1c; 100])
                .unwrap_err()
                .contains("within one another")
        );
        assert!(
            walk(&[0x19; 100])
                .unwrap_err()
                .contains("within one another")
        );
    }

    /// The header of a dictionary page.
    fn page(unpacked: i64, packed: i64, values: i64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut number = |head: &[u8], number: i64| {
            bytes.extend_from_slice(head);
            let mut left = ((number << 1) ^ (number >> 63)) as u64;
            while left >= 0x80 {
                bytes.push(left as u8 | 0x80);
                left >>= 7;
            }
            bytes.push(left as u8);
        };
        // 1 type, 2 uncompressed_page_size, 3 compressed_page_size, each a step of one; 7 dictionary_page_header, 1 num_values.
        number(&[0x15], 2);
        number(&[0x15], unpacked);
        number(&[0x15], packed);
        number(&[0x4c, 0x15], values);
        bytes.extend([0, 0]);
        bytes
    }

    #[test]
    fn pages_must_lie_in_their_column_and_hold_what_they_announce() {
        use std::io::Write;

        let said = |pages: &[(i64, i64, i64)]| {
            let mut bytes = Vec::new();
            for &(unpacked, packed, values) in pages {
                bytes.extend(page(unpacked, packed, values));
                bytes.resize(bytes.len() + packed.clamp(0, 100) as usize, 0xff);
            }
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            let chunk = Chunk {
                bytes: bytes.len() as i64,
                ..Chunk::default()
            };
            check_pages(&file, bytes.len() as u64, chunk)
                .err()
                .unwrap_or_default()
        };
        assert_eq!(said(&[(40, 20, 10), (LARGEST_PAGE, 0, 0)]), "");
        for (page, why) in [
            (
                (40, 20, 11),
                "a dictionary of 40 bytes is said to have 11 values",
            ),
            ((40, 20, -1), "is said to have -1 values"),
            (
                (40, 20, i64::from(i32::MAX)),
                "is said to have 2147483647 values",
            ),
            (
                (LARGEST_PAGE + 1, 20, 0),
                "is said to unpack to 268435457 bytes",
            ),
            ((-1, 20, 0), "is said to unpack to -1 bytes"),
            (
                (40, 101, 0),
                "is said to have 101 bytes, its column ends at byte",
            ),
            ((40, -20, 0), "is said to have -20 bytes"),
            (
                (40, i64::MAX, 0),
                "is said to have 9223372036854775807 bytes",
            ),
        ] {
            let refused = said(&[(40, 20, 10), page]);
            assert!(refused.contains(why), "{refused}");
        }
        let file = tempfile::tempfile().unwrap();
        for (data, bytes, file_bytes) in [
            (-1, 5, 10),
            (8, 5, 10),
            (0, -1, 10),
            (i64::MAX, 1, 10),
            (0, 5, 10),
        ] {
            let chunk = Chunk {
                data,
                bytes,
                ..Chunk::default()
            };
            assert!(check_pages(&file, file_bytes, chunk).is_err(), "{chunk:?}");
        }
    }

    #[test]
    fn groups_must_have_the_members_they_announce_and_end_somewhere() {
        assert_eq!(check_groups(&[2, 0, 2, 0, 0]), Ok(()));
        assert!(check_groups(&[i64::from(i32::MAX), 0]).is_err());
        assert!(check_groups(&[-1]).is_err());
        let deep = vec![1; 100];
        assert!(
            check_groups(&deep)
                .unwrap_err()
                .contains("within one another")
        );
        // Many groups beside one another are no depth.
        let flat: Vec<i64> = std::iter::once(200)
            .chain((0..200).flat_map(|_| [1, 0]))
            .collect();
        assert_eq!(check_groups(&flat), Ok(()));
    }
}
