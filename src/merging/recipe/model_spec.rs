//! A model of a recipe: `model@revision+adapter@revision`, as mergekit writes it.
//!
//! Paths are relative to the current folder. mergekit cannot read a path with `+` or `@` in this form. Here, text that exists as a path
//! is read as that path, `+` and `@` included. The form of a map, `{model: {path: a+b, revision: c}, lora: d}`, can hold every path, in
//! both programs.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use crate::failure::Failure;

const HINT: &str = "write MODEL, MODEL@REVISION or MODEL+ADAPTER; in a file, {model: {path: PATH}, lora: {path: PATH}} takes every path";

/// A model, alone or with an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "ModelForm")]
pub struct ModelSpec {
    /// A folder or a hub id.
    pub model: String,
    /// A branch, tag or commit of the hub id.
    pub revision: Option<String>,
    /// The folder or hub id of a LoRA adapter, and its revision.
    pub adapter: Option<(String, Option<String>)>,
}

/// A model as a recipe writes it.
#[derive(Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "expected a model: MODEL, MODEL@REVISION or MODEL+ADAPTER (a number or a switch in quotes), or {model: {path: PATH, revision: REVISION}, lora: {path: PATH}}"
)]
pub(super) enum ModelForm {
    Text(String),
    Map { model: PathForm, lora: Option<PathForm> },
}

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(super) enum PathForm {
    Text(String),
    Map { path: String, revision: Option<String> },
}

impl PathForm {
    fn parts(self) -> Result<(String, Option<String>), Failure> {
        match self {
            Self::Text(text) => path_and_revision(&text),
            Self::Map { path, revision } => Ok((path, revision)),
        }
    }
}

impl TryFrom<ModelForm> for ModelSpec {
    type Error = Failure;

    fn try_from(form: ModelForm) -> Result<Self, Failure> {
        match form {
            ModelForm::Text(text) => text.parse(),
            ModelForm::Map { model, lora } => {
                let (model, revision) = model.parts()?;
                Ok(Self { model, revision, adapter: lora.map(PathForm::parts).transpose()? })
            }
        }
    }
}

impl FromStr for ModelSpec {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let is_path = Path::new(text).exists();
        let (model, adapter) = match text.split_once('+') {
            Some((model, adapter)) if !is_path => (model, Some(adapter)),
            _ => (text, None),
        };
        if adapter.is_some_and(|adapter| adapter.contains('+') && !Path::new(adapter).exists()) {
            return Err(unreadable(text, "it holds more than one `+`"));
        }
        let (model, revision) = path_and_revision(model)?;
        Ok(Self { model, revision, adapter: adapter.map(path_and_revision).transpose()? })
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |f: &mut fmt::Formatter<'_>, path: &str, revision: &Option<String>| {
            f.write_str(path)?;
            match revision {
                Some(revision) => write!(f, "@{revision}"),
                None => Ok(()),
            }
        };
        part(f, &self.model, &self.revision)?;
        if let Some((adapter, revision)) = &self.adapter {
            f.write_str("+")?;
            part(f, adapter, revision)?;
        }
        Ok(())
    }
}

impl ModelSpec {
    /// True where the form of text says the same to every reader.
    pub(super) fn is_plain(&self) -> bool {
        let adapter = self.adapter.iter();
        let paths = adapter.flat_map(|(path, revision)| [Some(path), revision.as_ref()]);
        [Some(&self.model), self.revision.as_ref()]
            .into_iter()
            .chain(paths)
            .flatten()
            .all(|part| !part.contains(['+', '@']))
            && self.to_string().parse().as_ref() == Ok(self)
    }
}

/// Splits `path@revision`.
fn path_and_revision(text: &str) -> Result<(String, Option<String>), Failure> {
    let (path, revision) = match text.split_once('@') {
        Some((path, revision)) if !Path::new(text).exists() => (path, Some(revision)),
        _ => (text, None),
    };
    if path.is_empty() || revision == Some("") {
        return Err(unreadable(text, "a part of it is empty"));
    }
    if revision.is_some_and(|revision| revision.contains('@')) {
        return Err(unreadable(text, "it holds more than one `@`"));
    }
    Ok((path.to_string(), revision.map(str::to_string)))
}

fn unreadable(text: &str, why: &str) -> Failure {
    Failure::new(format!("`{text}` does not name a model: {why}")).hint(HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> Result<ModelSpec, String> {
        text.parse().map_err(|failure: Failure| failure.message)
    }

    #[test]
    fn plus_separates_an_adapter_and_at_a_revision() {
        let all = spec("owner/name@v1+other/lora@main").unwrap();
        assert_eq!(all.model, "owner/name");
        assert_eq!(all.revision.as_deref(), Some("v1"));
        assert_eq!(all.adapter, Some(("other/lora".into(), Some("main".into()))));
        for text in ["a", "a@b", "a+b", "a@b+c", "a+b@c", "../a/b+/c/d"] {
            let spec = spec(text).unwrap();
            assert_eq!(spec.to_string(), text);
            assert!(spec.is_plain());
        }
        for text in ["", "+", "a+", "+a", "@", "a@", "a@b@c", "a+b+c", "a+b@", "a++b"] {
            assert!(spec(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_path_that_exists_is_one_path_whatever_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join("a+b@c");
        std::fs::create_dir(&odd).unwrap();
        let odd = odd.display().to_string();
        let alone = spec(&odd).unwrap();
        assert_eq!((alone.model.as_str(), alone.revision.as_ref()), (&*odd, None));
        assert!(!alone.is_plain());
        let with_base = spec(&format!("base@v1+{odd}")).unwrap();
        assert_eq!(with_base.adapter, Some((odd, None)));
        assert_eq!(with_base.model, "base");
    }
}
