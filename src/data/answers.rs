//! The tokens of a line of training data, and the tokens that loss counts on.
//!
//! Loss counts on all tokens of a text, and on the answers of a conversation: the assistant's messages, or a completion. An answer is
//! found by prefixes, for any template. The conversation before it is rendered with the place of an answer
//! (`add_generation_prompt`), and the conversation with it is rendered without. The answer's tokens begin where the tokens of the whole
//! conversation first differ from the first rendering, and end where they first differ from the second rendering. So they contain the
//! end of the turn, which the model must learn to write. If a token spans the border, it is the first that differs, and loss counts on it.
//!
//! Some templates render an answer differently once a message follows (they remove its thoughts, or trim it). No loss counts on that
//! answer, and it is counted as unmatched.

use anyhow::Result;
use serde_json::{Value, json};

use super::tokenizer::LONGEST_PIECE;
use super::training_line::TrainingLine;
use super::{ChatTemplate, Tokenizer};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The role of the messages that loss counts on.
const ANSWERS: &str = "assistant";

/// Tokens, and a flag per token: true if loss counts on it.
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
///   token, with loss from the first id that differs from the ids of the prompt alone
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
            Ok(MarkedTokens { is_target: vec![true; tokens.len()], tokens, unmatched: 0 })
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
    let mut marked = MarkedTokens { is_target: vec![false; tokens.len()], tokens, unmatched: 0 };
    let shared = |text: &str, tokens: &[u32]| -> Result<usize> {
        if text == whole {
            return Ok(tokens.len());
        }
        // A beginning longer than the whole is refused by its comparison; its first bytes decide.
        Ok(common(&tokenizer.encode_plain(text)?, tokens))
    };
    for answer in rendered.as_chunks::<2>().0 {
        let begin = shared(&answer[0], &marked.tokens)?;
        // An answer that is rendered differently later has no end there, and no loss counts on its beginning alone.
        let end = match whole.starts_with(&answer[1]) {
            true => shared(&answer[1], &marked.tokens)?,
            false => begin,
        };
        match marked.is_target.get_mut(begin..end) {
            Some(flags) if !flags.is_empty() => flags.fill(true),
            _ => marked.unmatched += 1,
        }
    }
    Ok(marked)
}

/// Ends the ids of a text with the end-of-text token, unless the tokenizer has none.
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

#[cfg(test)]
mod tests {
    use super::super::testing::shared;
    use super::*;

    /// Turns as `<role>content</s>`, with `<role>` as the place of an answer.
    const PLAIN: &str = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";

    /// Tokens and marks of a conversation of `(role, content)`; `None` where the reference's tokenizer is absent.
    fn marked(template: &str, turns: &[(&str, &str)]) -> Option<(Tokenizer, MarkedTokens)> {
        let tokenizer = Tokenizer::load(&shared("models/stories260k")?).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let chat = ChatTemplate::load(folder.path()).unwrap();
        let messages: Vec<Value> = turns
            .iter()
            .map(|(role, content)| json!({ "role": role, "content": content }))
            .collect();
        let marked = conversation(&messages, &tokenizer, &chat).unwrap();
        Some((tokenizer, marked))
    }

    /// The texts of the runs of tokens that loss counts on.
    fn answers(tokenizer: &Tokenizer, marked: &MarkedTokens) -> Vec<String> {
        let runs = marked.is_target.chunk_by(|one, next| one == next);
        let (mut first, mut texts) = (0, Vec::new());
        for run in runs {
            if run[0] {
                // Special tokens have no text.
                let ids = &marked.tokens[first..first + run.len()];
                let ends = ids.last() == tokenizer.eos().as_ref();
                let text = tokenizer.decode(ids).unwrap();
                texts.push(format!("{}{}", text.trim(), if ends { "</s>" } else { "" }));
            }
            first += run.len();
        }
        texts
    }

    #[test]
    fn loss_counts_on_every_answer_with_its_end_and_on_nothing_else() {
        let turns = [
            ("system", "Be kind."),
            ("user", "Tell me a story."),
            ("assistant", "A cat sat."),
            ("user", "Another. A cat sat."),
            // The same text again, and letters outside ASCII.
            ("assistant", "A cat sat."),
            ("user", "And one more?"),
            ("assistant", "Zoë saw a 猫."),
        ];
        let Some((tokenizer, marked)) = marked(PLAIN, &turns) else {
            return;
        };
        assert_eq!(marked.unmatched, 0);
        assert_eq!(
            answers(&tokenizer, &marked),
            ["A cat sat.</s>", "A cat sat.</s>", "Zoë saw a 猫.</s>"]
        );
    }

    #[test]
    fn an_empty_answer_is_its_end_and_a_conversation_without_answers_has_no_loss() {
        let empty = [("user", "Hello."), ("assistant", "")];
        let Some((tokenizer, first)) = marked(PLAIN, &empty) else {
            return;
        };
        assert_eq!(answers(&tokenizer, &first), ["</s>"]);
        let (_, none) = marked(PLAIN, &[("user", "Hello."), ("user", "Are you there?")]).unwrap();
        assert!(none.is_target.iter().all(|is_target| !is_target) && none.unmatched == 0);
    }

    #[test]
    fn an_answer_that_changes_once_a_message_follows_has_no_loss() {
        // Thoughts are removed, or spaces at the end are trimmed, from all answers but the last.
        for (change, thought, end) in [
            ("m['content'].split('THOUGHT')[-1]", "hmmTHOUGHT", ""),
            ("m['content'].strip()", "", "   "),
        ] {
            let template = PLAIN
                .replace("m['content']", &format!("(m['content'] if loop.last else {change})"));
            let (first, last) = (format!("{thought}One.{end}"), format!("{thought}Two.{end}"));
            let turns = [
                ("user", "Count."),
                ("assistant", first.as_str()),
                ("user", "Go on."),
                ("assistant", last.as_str()),
            ];
            let Some((tokenizer, marked)) = marked(&template, &turns) else {
                return;
            };
            assert_eq!(marked.unmatched, 1, "{change}");
            assert_eq!(answers(&tokenizer, &marked), [format!("{}</s>", last.trim())], "{change}");
        }
    }

    #[test]
    fn without_a_template_loss_counts_on_the_completion() {
        let Some(folder) = shared("models/stories260k") else {
            return;
        };
        let tokenizer = Tokenizer::load(&folder).unwrap();
        let line = TrainingLine::Completion {
            prompt: "Once upon a time".to_string(),
            completion: " there was a cat.".to_string(),
        };
        let marked = marked_tokens(&line, &tokenizer, None).unwrap();
        let texts = answers(&tokenizer, &marked);
        assert_eq!(texts.len(), 1);
        assert!(texts[0].starts_with("there was a cat."), "{texts:?}");
        assert_eq!(marked.tokens.len(), marked.is_target.len());
    }
}
