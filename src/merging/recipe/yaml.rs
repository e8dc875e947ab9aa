//! YAML files as nodes with the lines they begin on.
//!
//! `saphyr-parser` gives events of YAML 1.2; this file builds nodes from them, within limits on nesting and on the size after aliases
//! are unfolded. Scalars are read as PyYAML reads them (YAML 1.1: `yes`, `off`, `~`), since recipes are written for mergekit;
//! `1e-3` is a number, as it is there in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::Result;
use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};

use super::place::Place;
use crate::failure::{Failure, blaming};

/// Bytes of the largest file.
const LARGEST: usize = 1 << 20;

/// Bytes of the largest tree: its text, and [`NODE_BYTES`] per node. Aliases make a tree larger than its file.
const LARGEST_TREE: usize = 4 << 20;
const NODE_BYTES: usize = 16;

/// The deepest nesting of lists and maps. A recipe that uses everything needs 11.
const DEEPEST: usize = 32;

/// A node and the line it begins on.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) content: Content,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Scalar(Scalar),
    List(Vec<Node>),
    /// In the order of the file; every key once.
    Map(Vec<Entry>),
}

/// Text, in quotes or not.
#[derive(Debug, Clone)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Without quotes: `true` is a switch and `7` a number.
    pub(super) is_plain: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) place: Place,
    pub(super) key: String,
    pub(super) value: Node,
}

impl Scalar {
    /// True for nothing, `~` and `null`.
    pub(super) fn is_null(&self) -> bool {
        self.is_plain && matches!(self.text.as_str(), "" | "~" | "null" | "Null" | "NULL")
    }

    /// The switch that PyYAML reads.
    pub(super) fn switch(&self) -> Option<bool> {
        let is_one_case = self.text.chars().all(char::is_lowercase)
            || self.text.chars().skip(1).all(char::is_lowercase)
            || self.text.chars().all(char::is_uppercase);
        if !self.is_plain || !is_one_case {
            return None;
        }
        match self.text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        }
    }

    /// A finite decimal number, in quotes or not. Numbers that YAML 1.1 does not read as decimal (`010`, `0x1f`, `1:30`) give `None`.
    pub(super) fn number(&self) -> Option<f64> {
        let digits = self.text.trim_start_matches(['+', '-']);
        let is_octal = digits.len() > 1
            && digits.starts_with('0')
            && !digits[1..].starts_with(['.', 'e', 'E']);
        let is_number = digits.starts_with(|first: char| first.is_ascii_digit() || first == '.');
        if is_octal || !is_number {
            return None;
        }
        let number: f64 = self.text.parse().ok()?;
        number.is_finite().then_some(number)
    }

    /// A whole number from 0 on.
    pub(super) fn count(&self) -> Option<usize> {
        let is_count = self.text.bytes().all(|byte| byte.is_ascii_digit());
        self.number().filter(|_| is_count)?;
        self.text.parse().ok()
    }
}

impl Node {
    /// Words for an error.
    pub(super) fn shown(&self) -> String {
        match &self.content {
            Content::Scalar(scalar) if scalar.is_null() => "nothing".into(),
            Content::Scalar(scalar) => format!("`{}`", scalar.text),
            Content::List(items) => format!("a list of {}", items.len()),
            Content::Map(_) => "a map".into(),
        }
    }

    fn size(&self) -> usize {
        NODE_BYTES
            + match &self.content {
                Content::Scalar(scalar) => scalar.text.len(),
                Content::List(items) => items.iter().map(Self::size).sum(),
                Content::Map(entries) => {
                    entries.iter().map(|entry| entry.key.len() + entry.value.size()).sum()
                }
            }
    }

    fn depth(&self) -> usize {
        let depth = match &self.content {
            Content::Scalar(_) => return 0,
            Content::List(items) => items.iter().map(Self::depth).max(),
            Content::Map(entries) => entries.iter().map(|entry| entry.value.depth()).max(),
        };
        1 + depth.unwrap_or(0)
    }
}

/// Builds the nodes of the only document of a file.
///
/// # Errors
/// Fails for a file that is too large, is not YAML, holds no document or several, unfolds to more than the limits, repeats a key, has an
/// alias inside its own anchor, or has a tag.
pub(super) fn compose(text: &str, file: &Arc<str>) -> Result<Node> {
    if text.len() > LARGEST {
        return Err(Failure::new(format!(
            "`{file}` is too large for a recipe: {} bytes, at most {LARGEST} are read",
            text.len()
        ))
        .into());
    }
    let mut parser = Parser::new_from_str(text.trim_start_matches('\u{feff}'));
    let mut composer =
        Composer { file, open: Vec::new(), anchors: BTreeMap::new(), size: 0, document: None };
    let unreadable = Failure::new(format!("`{file}` cannot be read as YAML"));
    loop {
        let event = blaming(unreadable.clone(), || parser.next_event())?;
        match event {
            None | Some(Ok((Event::StreamEnd, _))) => break,
            Some(Ok((event, span))) => composer.take(event, span)?,
            Some(Err(error)) => {
                let place = Place::Line(file.clone(), error.marker().line());
                let failure = place.failure(format!("this is not YAML: {}", error.info()));
                let is_tab = error.info().contains("tab");
                return Err(if is_tab {
                    failure.hint("indent with spaces").into()
                } else {
                    failure.into()
                });
            }
        }
    }
    let document = composer.document;
    Ok(document.ok_or_else(|| Failure::new(format!("`{file}` is empty")))?)
}

/// A list or map that has not ended.
struct Open {
    anchor: usize,
    node: Node,
    /// The key whose value is next.
    key: Option<(Place, String)>,
    keys: BTreeSet<String>,
    /// Maps under the key `<<`.
    merged: Vec<Node>,
}

struct Composer<'a> {
    file: &'a Arc<str>,
    open: Vec<Open>,
    anchors: BTreeMap<usize, Node>,
    size: usize,
    document: Option<Node>,
}

impl Composer<'_> {
    fn take(&mut self, event: Event<'_>, span: Span) -> Result<(), Failure> {
        let place = Place::Line(self.file.clone(), span.start.line());
        match event {
            Event::DocumentStart(_) if self.document.is_some() => {
                Err(place.failure("a second document begins; a recipe is one document"))
            }
            Event::Scalar(text, style, anchor, tag) => {
                let is_text = is_text(tag.as_deref(), &place)?;
                let scalar = Scalar {
                    text: text.into_owned(),
                    is_plain: style == ScalarStyle::Plain && !is_text,
                };
                self.close(Content::Scalar(scalar), place, anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                is_text(tag.as_deref(), &place)?;
                self.begin(Content::List(Vec::new()), place, anchor)
            }
            Event::MappingStart(anchor, tag) => {
                is_text(tag.as_deref(), &place)?;
                self.begin(Content::Map(Vec::new()), place, anchor)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let open = self.open.pop().expect("the parser ends what it began");
                let node = with_merged(open.node, open.keys, open.merged);
                self.put(node, open.anchor)
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor) else {
                    return Err(place.failure("this alias stands inside the node it repeats"));
                };
                self.check_depth(&place, node.depth())?;
                let size = node.size();
                self.grow(&place, size)?;
                let content = self.anchors[&anchor].content.clone();
                self.put(Node { place, content }, 0)
            }
            _ => Ok(()),
        }
    }

    fn begin(&mut self, content: Content, place: Place, anchor: usize) -> Result<(), Failure> {
        self.check_depth(&place, 1)?;
        self.grow(&place, NODE_BYTES)?;
        let is_key = self.is_key();
        if is_key {
            return Err(place.failure("a key must be a word, not a list or a map"));
        }
        self.open.push(Open {
            anchor,
            node: Node { place, content },
            key: None,
            keys: BTreeSet::new(),
            merged: Vec::new(),
        });
        Ok(())
    }

    fn close(&mut self, content: Content, place: Place, anchor: usize) -> Result<(), Failure> {
        let node = Node { place, content };
        self.grow(&node.place, node.size())?;
        self.put(node, anchor)
    }

    /// True where the next node is a key.
    fn is_key(&self) -> bool {
        self.open
            .last()
            .is_some_and(|open| matches!(open.node.content, Content::Map(_)) && open.key.is_none())
    }

    fn check_depth(&self, place: &Place, more: usize) -> Result<(), Failure> {
        if self.open.len() + more <= DEEPEST {
            return Ok(());
        }
        Err(place.failure(format!("lists and maps stand in more than {DEEPEST} others")))
    }

    fn grow(&mut self, place: &Place, size: usize) -> Result<(), Failure> {
        self.size = self.size.saturating_add(size);
        if self.size <= LARGEST_TREE {
            return Ok(());
        }
        Err(place.failure(format!(
            "the recipe is larger than {LARGEST_TREE} bytes once its aliases are unfolded"
        )))
    }

    /// Adds a whole node to the list or map that is open.
    fn put(&mut self, mut node: Node, anchor: usize) -> Result<(), Failure> {
        if anchor != 0 {
            self.grow(&node.place.clone(), node.size())?;
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.document = Some(node);
            return Ok(());
        };
        let entries = match &mut open.node.content {
            Content::List(items) => {
                items.push(node);
                return Ok(());
            }
            Content::Map(entries) => entries,
            Content::Scalar(_) => unreachable!("a scalar is never open"),
        };
        let Some((place, key)) = open.key.take() else {
            open.key = Some(key_of(node, &mut open.keys)?);
            return Ok(());
        };
        if key == "<<" {
            return merge(node, &mut open.merged);
        }
        if matches!(&node.content, Content::Scalar(scalar) if scalar.text.is_empty()) {
            // The parser places nothing where the next token is.
            node.place = place.clone();
        }
        entries.push(Entry { place, key, value: node });
        Ok(())
    }
}

/// True for the tag `str`. All tags of the core schema except `str` are ignored; tags outside the core schema are refused.
fn is_text(tag: Option<&Tag>, place: &Place) -> Result<bool, Failure> {
    const CORE: [&str; 7] = ["bool", "float", "int", "map", "null", "seq", "str"];
    match tag {
        None => Ok(false),
        Some(tag) if tag.is_yaml_core_schema() && CORE.contains(&tag.suffix.as_str()) => {
            Ok(tag.suffix == "str")
        }
        Some(tag) => Err(place.failure(format!("the tag `{tag}` has no meaning in a recipe"))),
    }
}

/// The key that a node is.
fn key_of(node: Node, keys: &mut BTreeSet<String>) -> Result<(Place, String), Failure> {
    let Content::Scalar(scalar) = node.content else {
        return Err(node.place.failure("a key must be a word, not a list or a map"));
    };
    if !keys.insert(scalar.text.clone()) {
        return Err(node.place.failure(format!("the key `{}` stands here twice", scalar.text)));
    }
    Ok((node.place, scalar.text))
}

/// Adds the map or the maps under `<<`.
fn merge(node: Node, merged: &mut Vec<Node>) -> Result<(), Failure> {
    let maps = match node.content {
        Content::List(items) => items,
        _ => vec![node],
    };
    for map in maps {
        if !matches!(map.content, Content::Map(_)) {
            return Err(map.place.failure(format!("`<<` merges maps, found {}", map.shown())));
        }
        merged.push(map);
    }
    Ok(())
}

/// Adds to a map the entries of `merged` whose keys it lacks. If several maps have a key, the first map counts.
fn with_merged(mut node: Node, mut keys: BTreeSet<String>, merged: Vec<Node>) -> Node {
    if let Content::Map(entries) = &mut node.content {
        for map in merged {
            if let Content::Map(more) = map.content {
                entries.extend(more.into_iter().filter(|entry| keys.insert(entry.key.clone())));
            }
        }
    }
    node
}
