//! Bounds for sizes that a parquet file announces.
//!
//! The `parquet` crate (60.1) checks the sizes of lists and strings against the bytes of the file, and the place of each page.
//! It trusts three more sizes and allocates memory for them: the members of a column group, the unpacked bytes of a page, and
//! the values of a dictionary. It also follows groups within groups by recursion. And it unpacks gzip and brotli to their end, also
//! beyond the size that the page announces. This file checks these five before the crate reads them; the crate reports
//! every further error.
//!
//! The footer and the page headers are structures of Thrift's compact protocol: fields by id, each with a type. The ids come from
//! `parquet.thrift` in the parquet-format project.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use flate2::bufread::MultiGzDecoder;
use parquet::basic::Compression;
use parquet::file::metadata::FooterTail;

use crate::bytes::ByteSize;

/// The largest header of a page. Headers may quote the smallest and the largest value of the page.
const LARGEST_PAGE_HEADER: u64 = 1 << 20;
/// Bytes of a page that are unpacked at once.
const PIECE: usize = 16 << 10;
/// The largest page that is unpacked. Writers close a page at about 1 MiB, but they never split a value.
const LARGEST_PAGE: i64 = 256 << 20;
/// Nesting of Thrift structures. A footer has six levels.
const DEEPEST: usize = 32;
/// Nesting of column groups.
const DEEPEST_GROUP: usize = 64;

/// Checks the column groups in the footer of `file`. Fails when a group announces more members than the footer has columns, when groups are
/// nested too deep, when the footer is malformed, and when reading fails.
pub(super) fn check_groups(mut file: &File) -> Result<(), String> {
    let file_bytes = file.metadata().map_err(|error| error.to_string())?.len();
    let mut tail = [0; 8];
    let read = file.seek(SeekFrom::End(-8)).and_then(|_| file.read_exact(&mut tail));
    // Without a whole footer the crate stops before it reads groups.
    let (Ok(()), Ok(tail)) = (read, FooterTail::try_new(&tail)) else {
        return Ok(());
    };
    let footer_bytes = tail.metadata_length() as u64;
    let Some(begin) = file_bytes.checked_sub(8 + footer_bytes) else {
        return Ok(());
    };
    let footer = read_at(file, begin, footer_bytes).map_err(|error| error.to_string())?;
    // FileMetaData: 2 schema [SchemaElement: 5 num_children].
    let mut members = Vec::new();
    Walk::over(&footer, &mut |path, number| match (path, number) {
        ([2], None) => members.push(0),
        ([2, 5], Some(number)) => {
            members.iter_mut().last().into_iter().for_each(|last| *last = number)
        }
        _ => {}
    })
    .ok_or("its footer is malformed")?;
    check_members(&members)
}

/// Checks a schema, given as the number of members of each element, parents first.
fn check_members(members: &[i64]) -> Result<(), String> {
    // The members that are still to come, for each open group.
    let mut open: Vec<i64> = Vec::new();
    for &count in members {
        if count > members.len() as i64 {
            return Err(format!(
                "a group of columns announces {count} members, the footer has {}",
                members.len()
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
            return Err(format!("groups of columns are nested deeper than {DEEPEST_GROUP}"));
        }
    }
    Ok(())
}

/// Checks the pages of a column in a row group: `length` bytes of `file` from byte `begin` on. Fails when the column reaches
/// beyond the file, when a page or a dictionary is too large, when a page of gzip or brotli unpacks to more than it announces, when
/// a header is malformed, and when reading fails.
pub(super) fn check_pages(
    file: &File,
    begin: u64,
    length: u64,
    packing: Compression,
) -> Result<(), String> {
    let file_bytes = file.metadata().map_err(|error| error.to_string())?.len();
    let end = begin.saturating_add(length);
    if end > file_bytes {
        return Err(format!("a column reaches to byte {end}, the file has {file_bytes}"));
    }
    let mut at = begin;
    while at < end {
        let PageHeader { length, unpacked, packed, levels, dictionary_values } =
            PageHeader::read(file, at, end)?;
        if unpacked > LARGEST_PAGE {
            return Err(format!(
                "the page at byte {at} unpacks to {}, the limit is {}",
                ByteSize(unpacked as u64),
                ByteSize(LARGEST_PAGE as u64)
            ));
        }
        // Each string of a dictionary has at least its length, which takes four bytes.
        if dictionary_values > unpacked / 4 {
            return Err(format!(
                "a dictionary of {unpacked} bytes announces {dictionary_values} values"
            ));
        }
        // The crate refuses a page of negative size, and a page that ends after its column.
        let Ok(packed) = u64::try_from(packed) else {
            return Ok(());
        };
        let page = at.saturating_add(length);
        at = page.saturating_add(packed);
        // The levels of a page are not packed. The crate refuses levels of negative size.
        let levels = u64::try_from(levels).unwrap_or(0).min(packed);
        let begin = page.saturating_add(levels);
        let most = u64::try_from(unpacked).unwrap_or(0);
        if unpacks_beyond(most, file, begin, packed - levels, packing) {
            return Err(format!(
                "the page at byte {page} unpacks to more than the {} that it announces",
                ByteSize(most)
            ));
        }
    }
    Ok(())
}

/// Returns whether `packed` bytes of `file` from byte `begin` on unpack to more than `most`, for the codecs that the crate unpacks to
/// their end. A damaged page is left to the crate.
fn unpacks_beyond(
    most: u64,
    mut file: &File,
    begin: u64,
    packed: u64,
    packing: Compression,
) -> bool {
    if file.seek(SeekFrom::Start(begin)).is_err() {
        return false;
    }
    let packed = BufReader::new(file.take(packed));
    let unpacked: &mut dyn Read = match packing {
        Compression::GZIP(_) => &mut MultiGzDecoder::new(packed),
        Compression::BROTLI(_) => &mut brotli::Decompressor::new(packed, PIECE),
        _ => return false,
    };
    let mut unpacked = unpacked.take(most + 1);
    let mut buffer = vec![0; PIECE];
    loop {
        match unpacked.read(&mut buffer) {
            Ok(0) | Err(_) => return unpacked.limit() == 0,
            Ok(_) => {}
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct PageHeader {
    /// Bytes of the header itself.
    length: u64,
    unpacked: i64,
    packed: i64,
    /// Bytes of levels before the packed bytes, in a page of the second version.
    levels: i64,
    dictionary_values: i64,
}

impl PageHeader {
    /// Reads the header at byte `at` of a column that ends at byte `end`.
    fn read(file: &File, at: u64, end: u64) -> Result<Self, String> {
        for most in [1 << 10, LARGEST_PAGE_HEADER] {
            let bytes = read_at(file, at, most.min(end - at)).map_err(|error| error.to_string())?;
            let mut page = Self::default();
            // PageHeader: 2 uncompressed_page_size, 3 compressed_page_size, 7 dictionary_page_header [1 num_values],
            // 8 data_page_header_v2 [5 and 6: bytes of levels].
            let length = Walk::over(&bytes, &mut |path, number| match (path, number) {
                ([2], Some(number)) => page.unpacked = number,
                ([3], Some(number)) => page.packed = number,
                ([7, 1], Some(number)) => page.dictionary_values = number,
                ([8, 5 | 6], Some(number)) => page.levels = page.levels.saturating_add(number),
                _ => {}
            });
            if let Some(length) = length {
                page.length = length as u64;
                return Ok(page);
            }
        }
        Err(format!("the header of the page at byte {at} is malformed"))
    }
}

/// Reads up to `length` bytes of a file from byte `at` on.
fn read_at(mut file: &File, at: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A walk over a structure. `tell` receives the path of field ids of each integer, and of each structure with `None`. Members of
/// a list have the path of the list.
struct Walk<'a, 'w> {
    bytes: &'a [u8],
    path: Vec<i16>,
    tell: &'w mut dyn FnMut(&[i16], Option<i64>),
}

impl<'a, 'w> Walk<'a, 'w> {
    /// Walks over the structure at the beginning of `bytes`. Returns its length, or `None` if it is malformed.
    fn over(bytes: &'a [u8], tell: &'w mut dyn FnMut(&[i16], Option<i64>)) -> Option<usize> {
        let mut walk = Self { bytes, path: Vec::new(), tell };
        walk.structure(0)?;
        Some(bytes.len() - walk.bytes.len())
    }

    /// A structure: fields, each with the difference of its id to the previous id, up to a zero byte.
    fn structure(&mut self, depth: usize) -> Option<()> {
        let mut id = 0i16;
        loop {
            let head = self.byte()?;
            let kind = head & 0x0f;
            if kind == 0 {
                return Some(());
            }
            id = match head >> 4 {
                0 => i16::try_from(self.zigzag()?).ok()?,
                step => id.checked_add(step.into())?,
            };
            self.path.push(id);
            // The type of a boolean field holds its value.
            if !matches!(kind, 1 | 2) {
                self.value(kind, depth)?;
            }
            self.path.pop();
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Option<()> {
        if depth > DEEPEST {
            return None;
        }
        match kind {
            // A boolean in a list takes a byte.
            1..=3 => self.skip(1),
            4..=6 => {
                let number = self.zigzag()?;
                (self.tell)(&self.path, Some(number));
                Some(())
            }
            7 => self.skip(8),
            8 => {
                let length = self.varint()?;
                self.skip(length)
            }
            9 | 10 => {
                let head = self.byte()?;
                let count = match head >> 4 {
                    15 => self.varint()?,
                    count => count.into(),
                };
                (0..count).try_for_each(|_| self.value(head & 0x0f, depth + 1))
            }
            11 => {
                let count = self.varint()?;
                let kinds = if count > 0 { self.byte()? } else { 0 };
                (0..count).try_for_each(|_| {
                    self.value(kinds >> 4, depth + 1)?;
                    self.value(kinds & 0x0f, depth + 1)
                })
            }
            12 => {
                (self.tell)(&self.path, None);
                self.structure(depth + 1)
            }
            _ => None,
        }
    }

    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(byte)
    }

    fn skip(&mut self, length: u64) -> Option<()> {
        self.bytes = self.bytes.get(usize::try_from(length).ok()?..)?;
        Some(())
    }

    /// An integer of seven bits a byte, the lowest first. The eighth bit says that a byte follows.
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// A signed integer, in the order 0, −1, 1, −2, …
    fn zigzag(&mut self) -> Option<i64> {
        let number = self.varint()?;
        Some((number >> 1) as i64 ^ -((number & 1) as i64))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn walk(bytes: &[u8]) -> Option<Vec<(Vec<i16>, i64)>> {
        let mut numbers = Vec::new();
        Walk::over(bytes, &mut |path, number| {
            numbers.extend(number.map(|number| (path.to_vec(), number)));
        })?;
        Some(numbers)
    }

    #[test]
    fn numbers_are_found_by_their_path() {
        // Field 1: i32 −2. Field 3: list of two structures, each with field 2: i64 150 (two bytes of varint: 300).
        let bytes = [0x15, 3, 0x29, 0x2c, 0x26, 0xac, 2, 0, 0x26, 0xac, 2, 0, 0];
        let of_list = (vec![3, 2], 150);
        assert_eq!(walk(&bytes), Some(vec![(vec![1], -2), of_list.clone(), of_list]));
        for cut in 0..bytes.len() {
            assert_eq!(walk(&bytes[..cut]), None, "{cut}");
        }
    }

    #[test]
    fn malformed_structures_are_refused() {
        for bytes in [
            // A string of 9 bytes, of which only 1 follows.
            &[0x18, 9, 1][..],
            // A list of 16383 members, and a map of 200.
            &[0x19, 0xf5, 0xff, 0x7f, 1],
            &[0x1b, 200, 1, 0x55],
            // Type 13 does not exist.
            &[0x1d, 0],
            // A number of 70 bits.
            &[0x15, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255],
            // Structures in structures, and lists in lists, without an end.
            &[0x1c; 100],
            &[0x19; 100],
        ] {
            assert_eq!(walk(bytes), None, "{bytes:?}");
        }
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
        // 1 type, 2 uncompressed_page_size, 3 compressed_page_size, each id 1 above the last; 7 dictionary_page_header, 1 num_values.
        number(&[0x15], 2);
        number(&[0x15], unpacked);
        number(&[0x15], packed);
        number(&[0x4c, 0x15], values);
        bytes.extend([0, 0]);
        bytes
    }

    #[test]
    fn pages_and_dictionaries_of_impossible_sizes_are_refused() {
        let refused = |unpacked, values| {
            let mut bytes = Vec::new();
            for (unpacked, values) in [(40, 10), (unpacked, values)] {
                bytes.extend(page(unpacked, 20, values));
                bytes.resize(bytes.len() + 20, 0xff);
            }
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            check_pages(&file, 0, bytes.len() as u64, Compression::UNCOMPRESSED).err()
        };
        assert_eq!(refused(LARGEST_PAGE, 0), None);
        assert_eq!(refused(40, 10), None);
        assert_eq!(
            refused(LARGEST_PAGE + (1 << 20), 0).unwrap(),
            "the page at byte 31 unpacks to 257.00 MiB, the limit is 256.00 MiB"
        );
        assert_eq!(
            refused(40, i64::from(i32::MAX)).unwrap(),
            "a dictionary of 40 bytes announces 2147483647 values"
        );
        let empty = tempfile::tempfile().unwrap();
        assert!(
            check_pages(&empty, 8, 5, Compression::UNCOMPRESSED).unwrap_err().contains("byte 13")
        );
    }

    #[test]
    fn a_page_that_unpacks_beyond_its_size_is_refused_before_it_is_unpacked() {
        let text = vec![b'a'; 3 << 20];
        let mut gzipped = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzipped.write_all(&text).unwrap();
        let mut brotlied = brotli::CompressorWriter::new(Vec::new(), 4096, 1, 20);
        brotlied.write_all(&text).unwrap();
        for (packed, packing) in [
            (gzipped.finish().unwrap(), Compression::GZIP(Default::default())),
            (brotlied.into_inner(), Compression::BROTLI(Default::default())),
        ] {
            let refused = |announced: i64| {
                let mut bytes = page(announced, packed.len() as i64, 0);
                bytes.extend(&packed);
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&bytes).unwrap();
                check_pages(&file, 0, bytes.len() as u64, packing).err()
            };
            assert_eq!(refused(text.len() as i64), None, "{packing}");
            let why = refused(text.len() as i64 - 1).unwrap();
            assert!(why.contains("unpacks to more than"), "{packing}: {why}");
        }
    }

    #[test]
    fn groups_with_too_many_members_and_deep_groups_are_refused() {
        assert_eq!(check_members(&[2, 0, 2, 0, 0]), Ok(()));
        assert!(check_members(&[i64::from(i32::MAX), 0]).is_err());
        assert!(check_members(&[1; 100]).unwrap_err().contains("nested"));
        // Many groups side by side are not nested.
        let flat: Vec<i64> = std::iter::once(200).chain((0..200).flat_map(|_| [1, 0])).collect();
        assert_eq!(check_members(&flat), Ok(()));
    }
}
