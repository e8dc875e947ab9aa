//! A JSON list of any length as JSON lines: its entries are cut apart while it is read, so it is never in memory as a whole.

use crate::failure::Failure;

/// Cuts a list into lines. Takes the text in portions of any size.
#[derive(Debug, Default)]
pub(super) struct ArrayLines {
    /// Open brackets; the list itself is the first.
    depth: u64,
    is_string: bool,
    is_escaped: bool,
    has_ended: bool,
    /// Bytes read.
    position: u64,
}

impl ArrayLines {
    /// Adds the next portion of the list to `lines`: a line per entry, without the line ends inside the entry.
    /// Fails when text follows the list.
    pub(super) fn push(&mut self, text: &[u8], lines: &mut Vec<u8>) -> Result<(), Failure> {
        for &byte in text {
            self.position += 1;
            if self.is_string {
                self.is_string = self.is_escaped || byte != b'"';
                self.is_escaped = byte == b'\\' && !self.is_escaped;
                lines.push(byte);
                continue;
            }
            match byte {
                // White space, and the bytes of the mark of UTF-8 before the list.
                _ if byte.is_ascii_whitespace() => continue,
                0xef | 0xbb | 0xbf if self.depth == 0 && !self.has_ended => continue,
                b'[' if self.depth == 0 && !self.has_ended => {
                    self.depth = 1;
                    continue;
                }
                b']' if self.depth == 1 => {
                    (self.depth, self.has_ended) = (0, true);
                    lines.push(b'\n');
                    continue;
                }
                _ if self.depth == 0 => {
                    return Err(Failure::new(format!(
                        "text follows the end of the JSON list, at byte {}",
                        self.position - 1
                    ))
                    .hint("write one list, or an object per line without brackets around them"));
                }
                b',' if self.depth == 1 => {
                    lines.push(b'\n');
                    continue;
                }
                b'[' | b'{' => self.depth += 1,
                // A bracket that closes nothing stays for the parser of the line.
                b']' | b'}' => self.depth = self.depth.saturating_sub(1).max(1),
                b'"' => self.is_string = true,
                _ => {}
            }
            lines.push(byte);
        }
        Ok(())
    }

    /// Fails when the list has not ended.
    pub(super) fn finish(&self) -> Result<(), Failure> {
        match self.has_ended {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "the JSON list does not end; the file has {} bytes",
                self.position
            ))
            .hint("the file is incomplete: copy it again")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, portion: usize) -> Result<String, Failure> {
        let (mut array, mut lines) = (ArrayLines::default(), Vec::new());
        for portion in text.as_bytes().chunks(portion) {
            array.push(portion, &mut lines)?;
        }
        array.finish()?;
        Ok(String::from_utf8(lines).unwrap())
    }

    #[test]
    fn entries_become_lines_whatever_is_inside_them() {
        let text =
            "\u{feff} [\n {\"a\": \"x, ] \\\" [\",\n  \"b\": [1, {\"c\": \"\\\\\"}]},\n{}\n]\n";
        for portion in [1, 2, 7, 1000] {
            assert_eq!(
                lines(text, portion).unwrap(),
                "{\"a\":\"x, ] \\\" [\",\"b\":[1,{\"c\":\"\\\\\"}]}\n{}\n"
            );
        }
        assert!(lines("[{}", 9).unwrap_err().message.contains("does not end; the file has 3"));
        assert!(lines("[{}]\n[{}]", 9).unwrap_err().message.contains("at byte 5"));
    }
}
