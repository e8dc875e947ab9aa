//! The tokens that end a text.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::failure::Failure;
use crate::input::{cannot_read, read_settings};

/// The warning for an `eos_token_id` of `config.json` that `generation_config.json` does not have; `None` where they agree.
pub fn stop_warning(folder: &Path) -> Option<String> {
    let ids = |name: &str| {
        let text = read_settings(&folder.join(name)).ok()?;
        let config: Value = serde_json::from_str(&text).ok()?;
        ids_of(&config["eos_token_id"])
    };
    let (used, other) = (ids("generation_config.json")?, ids("config.json")?);
    let differs = other.iter().any(|id| !used.contains(id));
    differs.then(|| {
        format!(
            "`eos_token_id` is {used:?} in generation_config.json and {other:?} in config.json: generation_config.json is used, as in transformers"
        )
    })
}

/// The ids that end a text of this model: `eos_token_id` of `generation_config.json`, else of `config.json`, which is a number or a
/// list, else `of_tokenizer`, the tokenizer's `</s>`. Without any of them the list is empty, and the model never ends a text.
///
/// # Errors
/// Fails when a file is not JSON, or `eos_token_id` is neither a number nor a list.
pub fn stop_ids(folder: &Path, of_tokenizer: Option<u32>) -> Result<Vec<u32>> {
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        let text = match read_settings(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(cannot_read(&path, &error).into()),
        };
        let config: Value = serde_json::from_str(&text)
            .map_err(|error| Failure::new(format!("`{}` is not JSON: {error}", path.display())))?;
        let value = &config["eos_token_id"];
        if value.is_null() {
            continue;
        }
        let ids = ids_of(value).ok_or_else(|| {
            Failure::new(format!(
                "`eos_token_id` in `{}` is {value}; it must be a token id or a list of them",
                path.display()
            ))
            .hint("correct it, or remove the key: the tokenizer's `</s>` is used then")
        })?;
        return Ok(ids);
    }
    Ok(of_tokenizer.into_iter().collect())
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    match value {
        Value::Array(list) => list.iter().map(id).collect(),
        value => Some(vec![id(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use serde_json::json;

    #[test]
    fn generation_config_comes_before_config_and_the_tokenizer_last() {
        let folder = tempfile::tempdir().unwrap();
        let stops = || stop_ids(folder.path(), Some(2));
        assert_eq!(stops().unwrap(), [2]);
        let write = |name: &str, json: Value| {
            fs::write(folder.path().join(name), json.to_string()).unwrap();
        };
        write("config.json", json!({"eos_token_id": 7}));
        write("generation_config.json", json!({"eos_token_id": [3, 5]}));
        assert_eq!(stops().unwrap(), [3, 5]);
        let warning = stop_warning(folder.path()).unwrap();
        assert!(warning.contains("[3, 5]") && warning.contains("[7]"), "{warning}");
        write("config.json", json!({"eos_token_id": 5}));
        assert_eq!(stop_warning(folder.path()), None, "one of several");
        write("config.json", json!({"eos_token_id": 7}));
        write("generation_config.json", json!({"eos_token_id": null}));
        assert_eq!(stops().unwrap(), [7]);
        write("config.json", json!({}));
        assert_eq!(stops().unwrap(), [2]);
        assert_eq!(stop_ids(folder.path(), None).unwrap(), [0u32; 0]);
        fs::remove_file(folder.path().join("generation_config.json")).unwrap();
        write("config.json", json!({"eos_token_id": "</s>"}));
        let error = stops().unwrap_err().to_string();
        assert!(error.contains("`eos_token_id` in"), "{error}");
    }
}
