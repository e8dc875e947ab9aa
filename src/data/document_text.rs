//! The text of a document for calibration and evaluation: a text as it is, a conversation as the model's template renders it.

use anyhow::Result;

use super::answers::{check_length, no_template};
use super::chat::Beginning;
use super::document::Document;
use super::{ChatTemplate, Tokenizer};

/// The text of a document.
pub(super) struct DocumentText {
    pub(super) text: String,
    /// The template rendered the text, with its special tokens.
    pub(super) is_rendered: bool,
}

impl DocumentText {
    /// Renders a document. Fails when a conversation has no template, and when the template refuses it.
    pub(super) fn of(document: &Document, chat: Option<&ChatTemplate>) -> Result<Self> {
        let conversation = match (document, chat) {
            (Document::Text(text), _) => {
                return Ok(Self { text: text.clone(), is_rendered: false });
            }
            (Document::Completion { prompt, completion, .. }, None) => {
                return Ok(Self { text: format!("{prompt}{completion}"), is_rendered: false });
            }
            (Document::Conversation(_), None) => return Err(no_template().into()),
            (Document::Conversation(messages) | Document::Completion { messages, .. }, Some(_)) => {
                messages
            }
        };
        let messages = conversation.messages.len();
        let whole = Beginning { messages, is_answered: false, probed: None };
        let rendered = match chat {
            Some(chat) => chat.render_beginnings(conversation, &[whole])?,
            None => Vec::new(),
        };
        let text = rendered.into_iter().flatten().next().map(|rendered| rendered.text);
        let text = text.unwrap_or_default();
        check_length(&text)?;
        Ok(Self { text, is_rendered: true })
    }

    /// The ids of the text. A rendered text contains its special tokens.
    pub(super) fn ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        match self.is_rendered {
            true => tokenizer.encode_plain(&self.text),
            false => tokenizer.encode(&self.text),
        }
    }
}
