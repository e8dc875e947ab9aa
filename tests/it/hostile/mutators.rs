//! Kinds of damage to a file: flipped bits, cut ends, parts copied over parts, extreme numbers.
//!
//! The property tests and the fuzz targets of `fuzz/` share this file, so it uses nothing of the crate. A seed decides everything, so
//! a failure is reproduced by its seed.

/// Numbers as text, for JSON; some of them JSON does not have.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2.5",
    "2147483648",
    "4294967297",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-1e-308",
    "NaN",
    "null",
    "[]",
    "\"7\"",
];

/// The same as words of a binary file.
const WORDS: [u64; 9] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, 1 << 40, 1 << 63, u64::MAX];

/// A stream of numbers from a seed: Steele, Lea and Flood's SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 below 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Spoils `bytes` in one to four ways.
pub(crate) fn spoil(bytes: &mut Vec<u8>, seed: u64) {
    let mut random = Random(seed);
    for _ in 0..=random.below(4) {
        match random.below(8) {
            0 | 1 => flip(bytes, &mut random),
            2 => bytes.truncate(random.below(bytes.len() + 1)),
            3 => splice(bytes, &mut random),
            4 => word(bytes, &mut random),
            5 => byte(bytes, &mut random),
            _ => number(bytes, &mut random),
        }
    }
}

fn flip(bytes: &mut [u8], random: &mut Random) {
    let at = random.below(bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

/// Another byte; half of them the marks and digits of JSON, which keep it alive and change what it says.
fn byte(bytes: &mut [u8], random: &mut Random) {
    const MARKS: &[u8] = b"0123456789,:{}[]\"-.eE \n\\";
    let at = random.below(bytes.len());
    let any = random.next() as u8;
    if let Some(byte) = bytes.get_mut(at) {
        *byte = if any & 1 == 0 { MARKS[any as usize / 2 % MARKS.len()] } else { any };
    }
}

/// Copies a part behind some place, which overwrites, inserts or repeats.
fn splice(bytes: &mut Vec<u8>, random: &mut Random) {
    let from = random.below(bytes.len());
    let length = random.below(64.min(bytes.len() - from) + 1);
    let part = bytes[from..from + length].to_vec();
    let to = random.below(bytes.len() + 1);
    let over = if random.below(2) == 0 { length } else { 0 };
    let end = (to + over).min(bytes.len());
    bytes.splice(to..end, part);
}

/// Overwrites one, two, four or eight bytes by an awkward number.
fn word(bytes: &mut [u8], random: &mut Random) {
    let length = 1 << random.below(4);
    let number = WORDS[random.below(WORDS.len())].to_le_bytes();
    // Lengths stand at the beginnings and ends of files.
    let at = match random.below(4) {
        0 => 0,
        1 => bytes.len().saturating_sub(8),
        _ => random.below(bytes.len()),
    };
    for (byte, of_number) in bytes.iter_mut().skip(at).zip(&number[..length]) {
        *byte = *of_number;
    }
}

/// Replaces a run of digits by another number.
fn number(bytes: &mut Vec<u8>, random: &mut Random) {
    let starts: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit()))
        .collect();
    let Some(&start) = starts.get(random.below(starts.len())) else {
        return;
    };
    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = NUMBERS[random.below(NUMBERS.len())];
    bytes.splice(start..start + digits, number.bytes());
}
