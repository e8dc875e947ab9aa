//! A recipe as YAML that mergekit reads. Reading it gives the same recipe.

use std::fmt::Write as _;
use std::path::Path;

use super::contents::{MergeInputs, Recipe};
use super::model_spec::ModelSpec;
use super::parameter::Parameter;
use super::setting::{Parameters, Setting};
use super::tokenizer::{TokenName, TokenRow, TokenizerRecipe, TokenizerSource};
use crate::run::manifest::name_of;

/// The name of a folder, as [`name_of`] gives it, for files that are published; a hub id stays. A relative path of two components counts as
/// a hub id if no such folder exists.
pub fn without_folders(path: &str) -> String {
    let components = path.trim_end_matches('/').split('/').count();
    let is_hub_id =
        components <= 2 && !path.starts_with(['.', '/', '~']) && !Path::new(path).exists();
    if is_hub_id {
        return path.to_string();
    }
    name_of(path)
}

impl Recipe {
    /// Writes the recipe as YAML that mergekit reads. `shown` gives the text for each path of a model or an adapter: the path itself,
    /// or [`without_folders`] for a file that is published.
    pub fn to_yaml(&self, shown: impl Fn(&str) -> String) -> String {
        let mut writer = YamlWriter { text: String::new(), shown: &shown };
        writer.recipe(self);
        writer.text
    }
}

struct YamlWriter<'a> {
    text: String,
    shown: &'a dyn Fn(&str) -> String,
}

impl YamlWriter<'_> {
    fn recipe(&mut self, recipe: &Recipe) {
        self.entry(0, "merge_method", &quoted(&recipe.merge_method));
        if let Some(base) = &recipe.base_model {
            let base = self.model(base);
            self.entry(0, "base_model", &base);
        }
        if recipe.module_parameters.is_empty() {
            self.inputs(0, &recipe.inputs);
        } else {
            self.key(0, "modules");
            self.key(2, "default");
            self.inputs(4, &recipe.inputs);
            self.parameters(4, &recipe.module_parameters);
        }
        self.parameters(0, &recipe.parameters);
        for (key, dtype) in [("dtype", recipe.dtype), ("out_dtype", recipe.out_dtype)] {
            if let Some(dtype) = dtype {
                self.entry(0, key, dtype.torch_name());
            }
        }
        if let Some(tokenizer) = &recipe.tokenizer {
            self.tokenizer(tokenizer);
        }
        if let Some(template) = &recipe.chat_template {
            self.entry(0, "chat_template", &quoted(template));
        }
    }

    fn inputs(&mut self, indent: usize, inputs: &MergeInputs) {
        match inputs {
            MergeInputs::Models(inputs) => {
                self.key(indent, "models");
                for input in inputs {
                    self.item(indent + 2, |writer, indent| {
                        let model = writer.model(&input.model);
                        writer.entry(indent, "model", &model);
                        writer.parameters(indent, &input.parameters);
                    });
                }
            }
            MergeInputs::Slices(slices) => {
                self.key(indent, "slices");
                for slice in slices {
                    self.item(indent + 2, |writer, indent| {
                        writer.key(indent, "sources");
                        for source in &slice.sources {
                            writer.item(indent + 2, |writer, indent| {
                                let model = writer.model(&source.model);
                                writer.entry(indent, "model", &model);
                                let range = &source.layer_range;
                                let range = format!("[{}, {}]", range.start, range.end);
                                writer.entry(indent, "layer_range", &range);
                                writer.parameters(indent, &source.parameters);
                            });
                        }
                        if let Some(base) = &slice.base_model {
                            let base = writer.model(base);
                            writer.entry(indent, "base_model", &base);
                        }
                        writer.parameters(indent, &slice.parameters);
                    });
                }
            }
        }
    }

    fn parameters(&mut self, indent: usize, parameters: &Parameters) {
        if parameters.is_empty() {
            return;
        }
        self.key(indent, "parameters");
        for (parameter, setting) in parameters.iter() {
            self.setting(indent + 2, parameter, setting);
        }
    }

    fn setting(&mut self, indent: usize, parameter: Parameter, setting: &Setting) {
        if let [case] = setting.cases.as_slice()
            && case.filter.is_none()
        {
            let points = points(parameter, &case.points);
            return self.entry(indent, parameter.name(), &points);
        }
        self.key(indent, parameter.name());
        for case in &setting.cases {
            self.item(indent + 2, |writer, indent| {
                if let Some(filter) = &case.filter {
                    writer.entry(indent, "filter", &quoted(filter));
                }
                writer.entry(indent, "value", &points(parameter, &case.points));
            });
        }
    }

    fn tokenizer(&mut self, tokenizer: &TokenizerRecipe) {
        let source = match &tokenizer.source {
            TokenizerSource::Base => "base".into(),
            TokenizerSource::Union => "union".into(),
            TokenizerSource::Model(model) => self.model(model),
        };
        if tokenizer.tokens.0.is_empty() && tokenizer.pad_to_multiple_of.is_none() {
            return self.entry(0, "tokenizer_source", &source);
        }
        self.key(0, "tokenizer");
        self.entry(2, "source", &source);
        if let Some(multiple) = tokenizer.pad_to_multiple_of {
            self.entry(2, "pad_to_multiple_of", &multiple.to_string());
        }
        if tokenizer.tokens.0.is_empty() {
            return;
        }
        self.key(2, "tokens");
        for (name, token) in &tokenizer.tokens.0 {
            self.key(4, &quoted(name));
            if let Some(row) = &token.source {
                let row = self.token_row(row);
                self.entry(6, "source", &row);
            }
            self.entry(6, "force", &token.force.to_string());
        }
    }

    fn token_row(&self, row: &TokenRow) -> String {
        let (model, token) = match row {
            TokenRow::Model(model) => return self.model(model),
            TokenRow::Zero => return "{kind: zero}".into(),
            TokenRow::Token(model, TokenName::Text(text)) => {
                (model, format!("token: {}", quoted(text)))
            }
            TokenRow::Token(model, TokenName::Id(id)) => (model, format!("token_id: {id}")),
        };
        format!("{{kind: model_token, model: {}, {token}}}", self.model(model))
    }

    /// A model in one line.
    fn model(&self, model: &ModelSpec) -> String {
        let shown = ModelSpec {
            model: (self.shown)(&model.model),
            revision: model.revision.clone(),
            adapter: model
                .adapter
                .as_ref()
                .map(|(path, revision)| ((self.shown)(path), revision.clone())),
        };
        if shown.is_plain() {
            return quoted(&shown.to_string());
        }
        let path = |path: &str, revision: &Option<String>| match revision {
            Some(revision) => format!("{{path: {}, revision: {}}}", quoted(path), quoted(revision)),
            None => format!("{{path: {}}}", quoted(path)),
        };
        let model = path(&shown.model, &shown.revision);
        match &shown.adapter {
            Some((adapter, revision)) => {
                format!("{{model: {model}, lora: {}}}", path(adapter, revision))
            }
            None => format!("{{model: {model}}}"),
        }
    }

    fn key(&mut self, indent: usize, key: &str) {
        writeln!(self.text, "{:indent$}{key}:", "").expect("memory");
    }

    fn entry(&mut self, indent: usize, key: &str, value: &str) {
        writeln!(self.text, "{:indent$}{key}: {value}", "").expect("memory");
    }

    /// Writes an item of a list. `write` gets the indentation of its lines.
    fn item(&mut self, indent: usize, write: impl FnOnce(&mut Self, usize)) {
        let start = self.text.len() + indent;
        write(self, indent + 2);
        // The first line of the item is indented by as many spaces.
        self.text.replace_range(start..start + 2, "- ");
    }
}

fn points(parameter: Parameter, points: &[f64]) -> String {
    let point = |value: &f64| match parameter.is_switch() {
        true => (*value != 0.0).to_string(),
        false => value.to_string(),
    };
    match points {
        [value] => point(value),
        _ => {
            let points: Vec<String> = points.iter().map(point).collect();
            format!("[{}]", points.join(", "))
        }
    }
}

/// Text as a scalar: without quotes where every reader takes it for text.
fn quoted(text: &str) -> String {
    const NO_TEXT: [&str; 9] = ["false", "n", "no", "null", "off", "on", "true", "y", "yes"];
    let is_word = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        || text.starts_with("./")
        || text.starts_with("../");
    let is_plain = is_word
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_./+@-".contains(c))
        && !NO_TEXT.contains(&text.to_ascii_lowercase().as_str());
    if is_plain {
        return text.to_string();
    }
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            ' '..='~' => quoted.push(c),
            _ if c.is_alphanumeric() => quoted.push(c),
            _ => write!(quoted, "\\U{:08x}", u32::from(c)).expect("memory"),
        }
    }
    quoted.push('"');
    quoted
}
