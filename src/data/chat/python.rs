//! Values as Python prints them: templates are written for Python, so `none`, numbers and lists must look as they do there.
//!
//! [`dumps`] is `json.dumps`, which `transformers` gives to templates as the filter `tojson`. [`text`] is `str`.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The layout of JSON: the arguments of `json.dumps`.
struct JsonLayout {
    is_ascii: bool,
    /// A step of indentation; `None` for a single line.
    indent: Option<String>,
    /// The texts after an entry and after a key.
    separators: (String, String),
    sorts_keys: bool,
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, with the arguments in this order.
///
/// # Errors
/// Fails for a value that JSON does not have, and for arguments of a wrong type.
pub(super) fn dumps(value: &Value, given: &[Value]) -> Result<Value, Error> {
    let wrong = |name: &str| {
        Error::new(ErrorKind::InvalidOperation, format!("`{name}` of tojson has a wrong type"))
    };
    let (given, named) = match given.split_last() {
        Some((last, rest)) if last.is_kwargs() => (rest, Some(Kwargs::try_from(last.clone())?)),
        _ => (given, None),
    };
    let mut arguments = Vec::new();
    for (index, name) in ["ensure_ascii", "indent", "separators", "sort_keys"].iter().enumerate() {
        let named = match &named {
            Some(named) => named.get::<Option<Value>>(name)?,
            None => None,
        };
        let value = named.or_else(|| given.get(index).cloned());
        arguments.push(value.filter(|value| !value.is_none()));
    }
    if let Some(named) = named {
        named.assert_all_used()?;
    }
    let [is_ascii, indent, separators, sorts_keys] = &arguments[..] else {
        return Err(wrong("arguments"));
    };
    let indent = match indent {
        None => None,
        Some(step) => match (step.as_str(), i64::try_from(step.clone())) {
            (Some(step), _) => Some(step.to_owned()),
            (None, Ok(spaces @ 0..=100)) => Some(" ".repeat(spaces as usize)),
            _ => return Err(wrong("indent")),
        },
    };
    let separators = match separators {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let mut pair = pair.try_iter()?.map(|part| part.as_str().map(str::to_owned));
            match (pair.next().flatten(), pair.next().flatten(), pair.next()) {
                (Some(entry), Some(key), None) => (entry, key),
                _ => return Err(wrong("separators")),
            }
        }
    };
    let is_true = |value: &Option<Value>| value.as_ref().is_some_and(Value::is_true);
    let layout = JsonLayout {
        is_ascii: is_true(is_ascii),
        indent,
        separators,
        sorts_keys: is_true(sorts_keys),
    };
    let mut json = String::new();
    layout.write(value, 0, &mut json)?;
    Ok(Value::from_safe_string(json))
}

impl JsonLayout {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => *out += "null",
            ValueKind::Bool => *out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => *out += &number(value),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let entries: Vec<Value> = value.try_iter()?.collect();
                self.write_all(['[', ']'], entries.len(), depth, out, &mut |at, out| {
                    self.write(&entries[at], depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorts_keys {
                    keys.sort();
                }
                self.write_all(['{', '}'], keys.len(), depth, out, &mut |at, out| {
                    let mut key = String::new();
                    match keys[at].as_str() {
                        Some(text) => key += text,
                        None => self.write(&keys[at], 0, &mut key)?,
                    }
                    self.write_string(&key, out);
                    *out += &self.separators.1;
                    self.write(&value.get_item(&keys[at])?, depth + 1, out)
                })?;
            }
            kind => {
                let why = format!("a value of type {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        }
        Ok(())
    }

    /// Writes the entries of a list or of an object between its brackets.
    fn write_all(
        &self,
        brackets: [char; 2],
        count: usize,
        depth: usize,
        out: &mut String,
        entry: &mut dyn FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(step) = &self.indent {
                out.push('\n');
                *out += &step.repeat(depth);
            }
        };
        out.push(brackets[0]);
        for at in 0..count {
            if at > 0 {
                *out += &self.separators.0;
            }
            line(depth + 1, out);
            entry(at, out)?;
        }
        if count > 0 {
            line(depth, out);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => *out += "\\\"",
                '\\' => *out += "\\\\",
                '\n' => *out += "\\n",
                '\r' => *out += "\\r",
                '\t' => *out += "\\t",
                '\u{8}' => *out += "\\b",
                '\u{c}' => *out += "\\f",
                c if c < ' '
                    || (self.is_ascii && !c.is_ascii())
                    || (self.is_ascii && c == '\u{7f}') =>
                {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A value as `str` prints it.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value),
    }
}

/// A value as `repr` prints it; nothing for an undefined value.
fn repr(value: &Value) -> String {
    let entries = |value: &Value| value.try_iter().into_iter().flatten().collect::<Vec<_>>();
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let entries: Vec<String> = entries(value).iter().map(repr).collect();
            format!("[{}]", entries.join(", "))
        }
        ValueKind::Map => {
            let pair = |key: &Value| {
                let value = value.get_item(key).unwrap_or_default();
                format!("{}: {}", repr(key), repr(&value))
            };
            let entries: Vec<String> = entries(value).iter().map(pair).collect();
            format!("{{{}}}", entries.join(", "))
        }
        _ => value.to_string(),
    }
}

/// A string in the quotes that Python chooses.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => shown += "\\n",
            '\r' => shown += "\\r",
            '\t' => shown += "\\t",
            '\\' => shown += "\\\\",
            c if c == quote => shown.extend(['\\', c]),
            c if c < ' ' || c == '\u{7f}' => {
                let _ = write!(shown, "\\x{:02x}", c as u32);
            }
            c => shown.push(c),
        }
    }
    shown.push(quote);
    shown
}

/// A number. Python writes an exponent for a float of sixteen digits before the point, or of four zeros after it.
fn number(value: &Value) -> String {
    let float = f64::try_from(value.clone());
    let Some(float) = float.ok().filter(|_| !value.is_integer()) else {
        return value.to_string();
    };
    let exponent = format!("{float:e}");
    let (digits, power) = exponent.split_once('e').unwrap_or((&exponent, "0"));
    match power.parse::<i32>() {
        Ok(power) if !(-4..16).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", power.abs())
        }
        _ => format!("{float:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Environment;

    fn rendered(template: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", |value: &Value, given: minijinja::value::Rest<Value>| {
            dumps(value, &given)
        });
        let tool = r#"{"name": "f<'é", "args": [1, 2.5, null, true, 1e16, 1e-05], "none": {}}"#;
        let tool: super::super::super::ordered_json::OrderedJson =
            serde_json::from_str(tool).unwrap();
        let values = minijinja::context! { tool => Value::from_serialize(&tool) };
        environment.render_str(template, values).unwrap()
    }

    /// Each expected text was printed by Python 3.11: `json.dumps(tool, …)` with `ensure_ascii=False` where it is not stated.
    #[test]
    fn json_is_written_as_python_writes_it() {
        for (template, expected) in [
            (
                "{{ tool|tojson }}",
                r#"{"name": "f<'é", "args": [1, 2.5, null, true, 1e+16, 1e-05], "none": {}}"#,
            ),
            (
                "{{ tool|tojson(ensure_ascii=true, separators=[',', ':'], sort_keys=true) }}",
                r#"{"args":[1,2.5,null,true,1e+16,1e-05],"name":"f<'\u00e9","none":{}}"#,
            ),
            (
                "{{ tool.args[:2]|tojson(indent=2) }}{{ tool.none|tojson(indent=4) }}",
                "[\n  1,\n  2.5\n]{}",
            ),
            ("{{ {'a': [1]}|tojson(false, 1) }}", "{\n \"a\": [\n  1\n ]\n}"),
        ] {
            assert_eq!(rendered(template), expected, "{template}");
        }
    }

    #[test]
    fn values_are_printed_as_python_prints_them() {
        let list = Value::from_serialize(serde_json::json!(["a", "it's", null, 1.0, {"k": true}]));
        assert_eq!(text(&list), r#"['a', "it's", None, 1.0, {'k': True}]"#);
        assert_eq!(text(&Value::from("a\n")), "a\n");
        assert_eq!(text(&Value::UNDEFINED), "");
    }
}
