//! Bounds of a `tokenizer.json` whose library follows it without any: replacements that lengthen a text.
//!
//! A normalizer that replaces every space by a megabyte makes terabytes of a short text, and a chain of replacements grows with its length
//! as an exponent. So the product of all replacements is bounded. Published tokenizers lengthen a text at most four times: a space becomes
//! "▁", which has three bytes.

use std::path::Path;

use serde_json::Value;

use crate::failure::Failure;

/// The most times that the replacements of a tokenizer may lengthen a text.
const MOST_TIMES: usize = 64;
/// The longest text that a tokenizer may put before each text, in bytes.
const LONGEST_PREFIX: usize = 1 << 10;

/// Checks the normalizer or the decoder of a tokenizer.
pub(super) fn check(part: &Value, name: &str, path: &Path) -> Result<(), Failure> {
    let refused = |why: String| {
        Failure::new(format!("the {name} of `{}` {why}", path.display()))
            .hint("take the tokenizer.json this model was published with, from its page")
    };
    let mut times = 1usize;
    let mut open = vec![part];
    while let Some(part) = open.pop() {
        for inner in ["normalizers", "decoders"] {
            open.extend(part[inner].as_array().into_iter().flatten());
        }
        let text = |key: &str| part[key].as_str().map_or(0, str::len);
        match part["type"].as_str() {
            Some("Replace") => {
                let longer = match part["pattern"]["String"].as_str() {
                    Some(pattern) => text("content").div_ceil(pattern.len().max(1)),
                    // An expression may match between any two characters.
                    None => text("content") + 1,
                };
                times = times.saturating_mul(longer.max(1));
            }
            Some("Prepend") if text("prepend") > LONGEST_PREFIX => {
                let bytes = text("prepend");
                return Err(refused(format!(
                    "puts {bytes} bytes before each text, the limit is {LONGEST_PREFIX}"
                )));
            }
            _ => {}
        }
    }
    match times > MOST_TIMES {
        true => {
            Err(refused(format!("may lengthen a text {times} times, the limit is {MOST_TIMES}")))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn replacements_of_published_tokenizers_are_read_and_explosive_ones_refused() {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let space = json!({"String": " "});
        let all = |parts: Vec<Value>| json!({"type": "Sequence", "normalizers": parts});
        let prepend = |text: &str| json!({"type": "Prepend", "prepend": text});
        let is_read = |part: &Value| check(part, "normalizer", Path::new("tokenizer.json")).is_ok();
        let double = replace(json!({"String": "a"}), "aa");
        for part in [
            Value::Null,
            all(vec![prepend("▁"), replace(space.clone(), "▁")]),
            all(vec![json!({"type": "NFKC"}), replace(json!({"Regex": " {2,}"}), "▁")]),
            all(vec![double.clone(); 6]),
        ] {
            assert!(is_read(&part), "{part}");
        }
        for part in [
            replace(space, &"x".repeat(1000)),
            replace(json!({"Regex": ""}), &"x".repeat(64)),
            all(vec![double; 7]),
            all(vec![all(vec![replace(json!({"String": "a"}), &"b".repeat(99))])]),
            prepend(&"x".repeat(2000)),
        ] {
            assert!(!is_read(&part), "{part}");
        }
    }
}
