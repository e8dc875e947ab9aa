//! Names of a decoder's tensors: as a file stores them, and as the program uses them.
//!
//! The program uses the names of a language model by itself: `model.layers.0.…`, `model.embed_tokens.…`, `model.norm.…`, `lm_head.…`. A
//! model of several media stores them under a longer name, and a model that was saved without its head under a shorter name. A model
//! whose head is its embedding may store it under the head's name. Tensors beside the decoder keep their names, and files keep theirs.

use std::borrow::Cow;

/// The beginning of the names of the decoder's tensors.
const MODEL: &str = "model.";

/// The names after [`MODEL`] begin so.
const DECODER: [&str; 3] = ["layers.", "embed_tokens.", "norm."];

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Beginnings in files that stand for [`MODEL`], each with the name of the head.
const STORED: [(&str, &str); 3] = [
    ("model.language_model.", HEAD),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("", HEAD),
];

/// The names in the files of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Naming {
    /// Text that stands for [`MODEL`].
    model: &'static str,
    head: &'static str,
    /// The embedding is stored under the name of the head.
    embedding_is_head: bool,
}

impl Naming {
    /// The names of a language model by itself.
    pub(super) const PLAIN: Self = Self { model: MODEL, head: HEAD, embedding_is_head: false };

    /// The naming of a checkpoint with these tensors.
    pub(super) fn of<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Self {
        let has_layers = |model: &str| {
            let is_of_layer = |name: &str| {
                name.strip_prefix(model).is_some_and(|rest| rest.starts_with(DECODER[0]))
            };
            names.clone().any(is_of_layer)
        };
        let mut naming = Self::PLAIN;
        if !has_layers(MODEL)
            && let Some(&(model, head)) = STORED.iter().find(|(model, _)| has_layers(model))
        {
            naming = Self { model, head, ..naming };
        }
        let has = |name: &str| names.clone().any(|other| other == name);
        naming.embedding_is_head = !has(&naming.stored(EMBEDDING)) && has(naming.head);
        naming
    }

    /// The name the program uses, from the name in a file.
    pub(super) fn used(&self, stored: &str) -> String {
        if stored == self.head {
            return if self.embedding_is_head { EMBEDDING } else { HEAD }.to_owned();
        }
        let rest = stored.strip_prefix(self.model).filter(|rest| is_of_decoder(rest));
        rest.map_or_else(|| stored.to_owned(), |rest| format!("{MODEL}{rest}"))
    }

    /// The name in a file, from the name the program uses.
    pub(super) fn stored<'a>(&self, used: &'a str) -> Cow<'a, str> {
        if used == HEAD || (used == EMBEDDING && self.embedding_is_head) {
            return self.head.into();
        }
        match used.strip_prefix(MODEL).filter(|rest| is_of_decoder(rest)) {
            Some(rest) if self.model != MODEL => format!("{}{rest}", self.model).into(),
            _ => used.into(),
        }
    }
}

/// Returns whether a tensor, by the name the program uses, belongs to the language model: embedding, layers, norm, head.
pub fn is_of_text_model(used: &str) -> bool {
    used == HEAD || used.strip_prefix(MODEL).is_some_and(is_of_decoder)
}

/// The name the program uses for a tensor or module of the language model, from its name inside a model of several media. Other names
/// stay as they are.
pub fn name_of_text_model(stored: &str) -> String {
    for (model, head) in &STORED[..2] {
        let head = head.trim_end_matches(".weight");
        if let Some(rest) = stored.strip_prefix(head).filter(|rest| rest.starts_with('.')) {
            return format!("lm_head{rest}");
        }
        if let Some(rest) = stored.strip_prefix(model).filter(|rest| is_of_decoder(rest)) {
            return format!("{MODEL}{rest}");
        }
    }
    stored.to_owned()
}

fn is_of_decoder(rest: &str) -> bool {
    DECODER.iter().any(|beginning| rest.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_files_and_names_in_the_program_belong_together() {
        let layer = "layers.0.self_attn.q_proj.weight";
        for (files, head, embedding_is_head) in [
            ("model.", Some("lm_head.weight"), false),
            ("model.language_model.", Some("lm_head.weight"), false),
            ("language_model.model.", Some("language_model.lm_head.weight"), false),
            ("", None, false),
            ("model.", Some("lm_head.weight"), true),
            ("language_model.model.", Some("language_model.lm_head.weight"), true),
        ] {
            let mut stored = vec![format!("{files}{layer}"), format!("{files}norm.weight")];
            stored.extend(head.map(str::to_owned));
            stored.push("vision_tower.layers.0.weight".to_owned());
            stored.push("model.visual.norm.weight".to_owned());
            if !embedding_is_head {
                stored.push(format!("{files}embed_tokens.weight"));
            }
            let naming = Naming::of(stored.iter().map(String::as_str));
            let used: Vec<String> = stored.iter().map(|name| naming.used(name)).collect();
            assert_eq!(used[..2], [format!("model.{layer}"), "model.norm.weight".to_owned()]);
            assert!(used.iter().any(|name| name == EMBEDDING), "{used:?}");
            assert_eq!(used.contains(&HEAD.to_owned()), head.is_some() && !embedding_is_head);
            for other in ["vision_tower.layers.0.weight", "model.visual.norm.weight"] {
                assert!(used.iter().any(|name| name == other));
            }
            let back: Vec<_> = used.iter().map(|name| naming.stored(name)).collect();
            assert_eq!(back, stored);
            let of_text = used.iter().filter(|name| is_of_text_model(name)).count();
            assert_eq!(of_text, used.len() - 2, "{used:?}");
            if !files.is_empty() && !embedding_is_head {
                let names = stored.iter().map(|name| name_of_text_model(name));
                assert_eq!(names.collect::<Vec<_>>(), used);
            }
        }
    }
}
