//! [`Patterns`]: the keys of `rank_pattern` and `alpha_pattern`, and the first that matches a module.
//!
//! peft matches a key by `re.match(rf"(.*\.)?({key})$", module)`. Nearly all keys are names with dots. Names are compared byte by byte,
//! where a dot without a backslash is any byte. The rest of the keys form a set of regular expressions with a limit on its size. So a
//! config that was made to do harm costs neither memory nor time. Classes such as `\w` cover ASCII only.

use regex::bytes::{RegexSet, RegexSetBuilder};

/// The most keys of a pattern.
pub(super) const MOST_KEYS: usize = 4096;

/// The most keys that are not names.
pub(super) const MOST_EXPRESSIONS: usize = 256;

/// The most bytes of a key.
pub(super) const LONGEST_KEY: usize = 512;

/// Bytes of the automaton of all expressions of a pattern. A module that the lazy automaton cannot decide visits all of its states.
const AUTOMATON_BYTES: usize = 1 << 18;

/// Keys with their values. The first match counts.
#[derive(Debug, Clone)]
pub(super) struct Patterns<T> {
    /// Names, by their place in the config.
    names: Vec<(usize, PlainKey)>,
    /// Places in the config of the expressions.
    places: Vec<usize>,
    expressions: RegexSet,
    values: Vec<T>,
}

impl<T: Copy> Patterns<T> {
    /// Prepares keys in the order of the file.
    ///
    /// # Errors
    /// Fails for more or longer keys than there may be, and for an expression that cannot be compiled, with the reason.
    pub(super) fn new(entries: Vec<(String, T)>) -> Result<Self, String> {
        if entries.len() > MOST_KEYS {
            return Err(format!("it has {} keys; up to {MOST_KEYS} are read", entries.len()));
        }
        let (mut names, mut places, mut expressions) = (Vec::new(), Vec::new(), Vec::new());
        let mut values = Vec::with_capacity(entries.len());
        for (place, (key, value)) in entries.into_iter().enumerate() {
            if key.len() > LONGEST_KEY {
                return Err(format!(
                    "a key has {} bytes; up to {LONGEST_KEY} are read: `{}…`",
                    key.len(),
                    key.chars().take(40).collect::<String>()
                ));
            }
            match PlainKey::parse(&key) {
                Some(name) => names.push((place, name)),
                None => {
                    places.push(place);
                    expressions.push((format!(r"^(?:(?:.*\.)?(?:{key})$)"), key));
                }
            }
            values.push(value);
        }
        if expressions.len() > MOST_EXPRESSIONS {
            return Err(format!(
                "{} of its keys are regular expressions; up to {MOST_EXPRESSIONS} are read",
                expressions.len()
            ));
        }
        Ok(Self { names, places, expressions: compiled(&expressions)?, values })
    }

    /// The value of the first key that matches `module`.
    pub(super) fn first_match(&self, module: &str) -> Option<T> {
        let mut names = self.names.iter();
        let name = names.find(|(_, name)| name.matches(module.as_bytes()));
        let expressions = self.expressions.matches(module.as_bytes());
        let expression = expressions.iter().next().map(|at| self.places[at]);
        let first = name.map(|(place, _)| *place).into_iter().chain(expression);
        first.min().map(|place| self.values[place])
    }
}

/// Compiles all expressions into a set.
fn compiled(expressions: &[(String, String)]) -> Result<RegexSet, String> {
    let build = |texts: &[(String, String)]| {
        RegexSetBuilder::new(texts.iter().map(|(text, _)| text))
            .unicode(false)
            .size_limit(AUTOMATON_BYTES)
            .build()
    };
    let error = match build(expressions) {
        Ok(set) => return Ok(set),
        Err(error) => error,
    };
    if matches!(error, regex::Error::CompiledTooBig(_)) {
        return Err(format!(
            "its {} regular expressions are larger than {} KiB when they are compiled",
            expressions.len(),
            AUTOMATON_BYTES >> 10
        ));
    }
    // Finds the expression at fault.
    let alone = expressions.iter().find_map(|one| {
        let error = build(std::slice::from_ref(one)).err()?;
        Some((&one.1, error))
    });
    let (key, error) = alone.map_or((&expressions[0].1, error), |(key, own)| (key, own));
    let error = error.to_string();
    let last = error.lines().last().unwrap_or_default();
    Err(format!("the key `{key}` cannot be matched: {last}"))
}

/// A key that is a name: bytes, or any byte for a dot without a backslash.
#[derive(Debug, Clone)]
struct PlainKey(Vec<Option<u8>>);

impl PlainKey {
    fn parse(key: &str) -> Option<Self> {
        let mut bytes = key.bytes();
        let mut name = Vec::with_capacity(key.len());
        while let Some(byte) = bytes.next() {
            name.push(match byte {
                b'.' => None,
                b'\\' => Some(bytes.next().filter(|next| *next == b'.')?),
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => Some(byte),
                _ => return None,
            });
        }
        Some(Self(name))
    }

    /// Returns whether the name is the module, or its end after a dot.
    fn matches(&self, module: &[u8]) -> bool {
        let Some(start) = module.len().checked_sub(self.0.len()) else {
            return false;
        };
        // The end comes first: most modules of a model begin alike.
        let is_end = self
            .0
            .iter()
            .zip(&module[start..])
            .rev()
            .all(|(own, byte)| own.is_none_or(|own| own == *byte));
        is_end && (start == 0 || module[start - 1] == b'.')
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn patterns(keys: &[&str]) -> Patterns<usize> {
        let entries = keys.iter().enumerate();
        Patterns::new(entries.map(|(at, key)| (key.to_string(), at)).collect()).unwrap()
    }

    #[test]
    fn the_first_key_in_the_file_counts() {
        let found =
            patterns(&[r"layers\.[34]\.mlp\.down_proj", "q_proj", "z", "down_proj", ".*_proj"]);
        for (module, expected) in [
            ("model.layers.3.mlp.down_proj", Some(0)),
            ("model.layers.2.mlp.down_proj", Some(3)),
            ("model.layers.2.self_attn.q_proj", Some(1)),
            ("q_proj", Some(1)),
            ("model.layers.2.self_attn.k_proj", Some(4)),
            ("model.norm", None),
        ] {
            assert_eq!(found.first_match(module), expected, "{module}");
        }
    }

    /// `re.match(r"(.*\.)?(" + key + r")$", module)` of Python 3.12, by hand.
    #[test]
    fn names_match_as_the_expressions_that_they_are() {
        for (key, module, expected) in [
            ("proj", "q_proj", false),
            ("proj", "q.proj", true),
            ("", "q.", true),
            ("", "q", false),
            ("mlp.up", "model.mlp.up", true),
            ("mlp.up", "model.mlp_up", true),
            (r"mlp\.up", "model.mlp_up", false),
            ("a.b", "a.b", true),
            (".b", "a.b", false),
            (".b", "a..b", true),
            ("longer.than.this", "this", false),
        ] {
            assert!(PlainKey::parse(key).is_some(), "{key}");
            let name = patterns(&[key]).first_match(module).is_some();
            assert_eq!(name, expected, "{key} {module}");
            let expression = patterns(&[&format!("(?:{key})")]).first_match(module);
            assert_eq!(expression.is_some(), expected, "{key} {module}");
        }
    }

    #[test]
    fn keys_made_to_do_harm_are_refused_or_matched_at_once() {
        let many = |count: usize, key: &dyn Fn(usize) -> String| {
            Patterns::new((0..count).map(|at| (key(at), at)).collect())
        };
        let began = Instant::now();
        for (count, key, expected) in [
            (MOST_KEYS + 1, &(|at: usize| at.to_string()) as &dyn Fn(usize) -> String, "4097 keys"),
            (3000, &|at| format!(r"\w{{70}}{at}"), "3000 of its keys"),
            (200, &|at| format!(r"\w{{70}}{at}"), "256 KiB"),
            (1, &|_| "((a{100}){100}){100}".to_string(), "256 KiB"),
            (1, &|_| "x".repeat(LONGEST_KEY + 1), "513 bytes"),
            (2, &|at| ["q", "("][at].to_string(), "`(`"),
        ] {
            let error = many(count, key).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        // Nothing of it is decided before the end of a module.
        let slow = many(24, &|at| format!("(?:.*a){{8}}.*{at}z")).unwrap();
        let module = format!("model.layers.0.{}", "a".repeat(60));
        assert!((0..600).all(|_| slow.first_match(&module).is_none()));
        let names = many(MOST_KEYS, &|at| format!("layers.{at}.mlp.up_proj")).unwrap();
        for layer in 0..2000 {
            let module = format!("model.layers.{layer}.mlp.up_proj");
            assert_eq!(names.first_match(&module), Some(layer));
        }
        let seconds = began.elapsed().as_secs_f64();
        assert!(seconds < 30.0, "{seconds} s without optimisation");
    }
}
