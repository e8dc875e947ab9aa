//! The tokens of one line of training data, and the tokens that loss counts on.
//!
//! Loss counts on all tokens of a text, and on the answers of a conversation: the assistant's messages, or a completion. An answer is
//! found by prefixes, for any template. The conversation before it is rendered with the place of an answer
//! (`add_generation_prompt`), and the conversation with it is rendered without. The answer's tokens begin where the tokens of the
//! first differ from those of the whole conversation, and end where those of the second do. So they contain the end of the turn, which
//! the model must learn to write. If a token spans the border, it is the first that differs, and loss counts on it.
//!
//! Some templates render an answer differently once a message follows (they remove its thoughts). Its tokens then differ at its
//! beginning already; no loss counts on that answer, and it is counted as unmatched.

use anyhow::Result;
use serde_json::{Value, json};

use super::encoder::LONGEST_PIECE;
use super::training_line::TrainingLine;
use super::{ChatTemplate, Tokenizer};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The role of the messages that loss counts on.
const ANSWERS: &str = "assistant";

/// Tokens, and the flags of those that loss counts on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct MarkedTokens {
    pub(super) tokens: Vec<u32>,
    /// Loss counts on the token, `[tokens]`.
    pub(super) is_target: Vec<bool>,
    /// Answers that the whole conversation does not contain as they were rendered alone.
    pub(super) unmatched: usize,
}

/// The tokens of a line, by its kind.
///
/// * a text: its ids with the tokenizer's special tokens, then the end-of-text token; no token for an empty text
/// * a conversation: the ids of the rendered template, which contains its special tokens
/// * a prompt and a completion: a conversation of two messages; without a template the ids of both as one text, then the end-of-text
///   token, with loss behind the ids of the prompt alone
///
/// Fails when a conversation has no template, the template refuses it, and when the text cannot be tokenized.
pub(super) fn marked_tokens(
    line: &TrainingLine,
    tokenizer: &Tokenizer,
    chat: Option<&ChatTemplate>,
) -> Result<MarkedTokens> {
    match (line, chat) {
        (TrainingLine::Text(text), _) => {
            if text.is_empty() {
                return Ok(MarkedTokens::default());
            }
            let tokens = with_end(tokenizer.encode(text)?, tokenizer);
            Ok(MarkedTokens {
                is_target: vec![true; tokens.len()],
                tokens,
                unmatched: 0,
            })
        }
        (TrainingLine::Completion { prompt, completion }, None) => {
            let before = tokenizer.encode(prompt)?;
            let tokens = tokenizer.encode(&format!("{prompt}{completion}"))?;
            let begin = common(&before, &tokens);
            let tokens = with_end(tokens, tokenizer);
            Ok(MarkedTokens {
                is_target: (0..tokens.len()).map(|at| at >= begin).collect(),
                tokens,
                unmatched: 0,
            })
        }
        (TrainingLine::Completion { prompt, completion }, Some(chat)) => {
            let message = |role: &str, content: &str| json!({ "role": role, "content": content });
            let messages = [message("user", prompt), message(ANSWERS, completion)];
            conversation(&messages, tokenizer, chat)
        }
        (TrainingLine::Conversation(messages), Some(chat)) => {
            conversation(messages, tokenizer, chat)
        }
        (TrainingLine::Conversation(_), None) => Err(no_template().into()),
    }
}

/// The failure for messages without a template.
pub(super) fn no_template() -> Failure {
    Failure::new("`messages` need a chat template, and the model has none")
        .detail("looked for `chat_template.jinja`, and for `chat_template` in `tokenizer_config.json`")
        .hint("copy `chat_template.jinja` of the model's chat version into the model's folder, or write lines with `prompt` and `completion`")
}

fn conversation(
    messages: &[Value],
    tokenizer: &Tokenizer,
    chat: &ChatTemplate,
) -> Result<MarkedTokens> {
    let answers = (0..messages.len()).filter(|&index| messages[index]["role"] == ANSWERS);
    let beginnings: Vec<(usize, bool)> = answers
        .flat_map(|index| [(index, true), (index + 1, false)])
        .chain([(messages.len(), false)])
        .collect();
    let mut rendered = chat.render_beginnings(messages, &beginnings)?;
    let whole = rendered.pop().unwrap_or_default();
    if whole.len() > LONGEST_PIECE {
        return Err(Failure::new(format!(
            "a conversation has {} of text, the limit is {}",
            ByteSize(whole.len() as u64),
            ByteSize(LONGEST_PIECE as u64)
        ))
        .hint("divide it into several")
        .into());
    }
    let tokens = tokenizer.encode_plain(&whole)?;
    let mut marked = MarkedTokens {
        is_target: vec![false; tokens.len()],
        tokens,
        unmatched: 0,
    };
    let shared = |text: &str, tokens: &[u32]| -> Result<usize> {
        if text == whole {
            return Ok(tokens.len());
        }
        // A beginning longer than the whole is refused by its comparison; its first bytes decide.
        Ok(common(&tokenizer.encode_plain(text)?, tokens))
    };
    for answer in rendered.as_chunks::<2>().0 {
        let begin = shared(&answer[0], &marked.tokens)?;
        let end = shared(&answer[1], &marked.tokens)?;
        match marked.is_target.get_mut(begin..end) {
            Some(flags) if !flags.is_empty() => flags.fill(true),
            _ => marked.unmatched += 1,
        }
    }
    Ok(marked)
}

/// The ids of a text, ended by the end-of-text token if the tokenizer has one.
fn with_end(mut ids: Vec<u32>, tokenizer: &Tokenizer) -> Vec<u32> {
    if let Some(end) = tokenizer.eos()
        && ids.last() != Some(&end)
    {
        ids.push(end);
    }
    ids
}

/// Number of equal ids at the beginning of both.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}
