//! The tokens of a document, and the tokens that loss counts on.
//!
//! Loss counts on all tokens of a text, on a completion, and on the answers of a conversation ([`answer_places`](super::answer_places)):
//! on every token that stands for a byte of an answer, as in the masks of `transformers`.

use anyhow::Result;

use super::answer_places::{AnswerPlaces, find_answers};
use super::conversation::Conversation;
use super::document::Document;
use super::tokenizer::LONGEST_PIECE;
use super::{ChatTemplate, Tokenizer};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// Tokens, and a flag per token: true if loss counts on it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct MarkedTokens {
    pub(super) tokens: Vec<u32>,
    /// Loss counts on the token, `[tokens]`.
    pub(super) is_target: Vec<bool>,
    /// Answers that the rendered conversation does not contain.
    pub(super) unmatched: usize,
}

/// The tokens of a document, by its kind.
///
/// * a text: its ids with the tokenizer's special tokens, then the end-of-text token; no token for an empty text
/// * a conversation: the ids of the rendered template, which contains its special tokens
/// * a prompt and a completion: a conversation of two messages; without a template the ids of both as one text, then the end-of-text
///   token, with loss from the first id that differs from the ids of the prompt alone
///
/// Fails when a conversation has no template, the template refuses it, and when the text cannot be tokenized.
pub(super) fn marked_tokens(
    document: &Document,
    tokenizer: &Tokenizer,
    chat: Option<&ChatTemplate>,
) -> Result<MarkedTokens> {
    match (document, chat) {
        (Document::Text(text), _) => {
            if text.is_empty() {
                return Ok(MarkedTokens::default());
            }
            let tokens = with_end(tokenizer.encode(text)?, tokenizer);
            Ok(MarkedTokens { is_target: vec![true; tokens.len()], tokens, unmatched: 0 })
        }
        (Document::Completion { prompt, completion, .. }, None) => {
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
        (Document::Completion { messages, .. } | Document::Conversation(messages), Some(chat)) => {
            conversation(messages, tokenizer, chat)
        }
        (Document::Conversation(_), None) => Err(no_template().into()),
    }
}

/// The failure for a conversation without a template.
pub(super) fn no_template() -> Failure {
    Failure::new("a conversation needs a chat template, and the model has none")
        .detail("looked for `chat_template.jinja`, and for `chat_template` in `tokenizer_config.json`")
        .hint("copy `chat_template.jinja` of the model's chat version into the model's folder, or write `prompt` and `completion` as strings")
}

fn conversation(
    conversation: &Conversation,
    tokenizer: &Tokenizer,
    chat: &ChatTemplate,
) -> Result<MarkedTokens> {
    let AnswerPlaces { text, places, unmatched } = find_answers(conversation, tokenizer, chat)?;
    check_length(&text)?;
    let (tokens, bytes) = tokenizer.encode_with_places(&text)?;
    let mut is_target = vec![false; tokens.len()];
    let mut places = places.into_iter().peekable();
    for (flag, (begin, end)) in is_target.iter_mut().zip(bytes) {
        // Places and tokens are in order.
        while places.next_if(|place| begin >= place.end).is_some() {}
        *flag = places.peek().is_some_and(|place| end > place.start);
    }
    Ok(MarkedTokens { tokens, is_target, unmatched })
}

/// Refuses a conversation that is too long for one call of the tokenizer.
pub(super) fn check_length(text: &str) -> Result<(), Failure> {
    if text.len() <= LONGEST_PIECE {
        return Ok(());
    }
    Err(Failure::new(format!(
        "a conversation has {} of text, the limit is {}",
        ByteSize(text.len() as u64),
        ByteSize(LONGEST_PIECE as u64)
    ))
    .hint("divide it into several"))
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
        let marked = conversation(&Conversation::of(turns.iter().copied()), &tokenizer, &chat);
        let marked = marked.unwrap();
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
    fn an_answer_that_changes_once_a_message_follows_has_loss_as_it_is_rendered() {
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
            assert_eq!(marked.unmatched, 0, "{change}");
            let expected = ["One.</s>".to_owned(), format!("{}</s>", last.trim())];
            assert_eq!(answers(&tokenizer, &marked), expected, "{change}");
        }
    }

    #[test]
    fn without_a_template_loss_counts_on_the_completion() {
        let Some(folder) = shared("models/stories260k") else {
            return;
        };
        let tokenizer = Tokenizer::load(&folder).unwrap();
        let line = br#"{"prompt": "Once upon a time", "completion": " there was a cat."}"#;
        let document = Document::parse(line).unwrap().unwrap();
        let marked = marked_tokens(&document, &tokenizer, None).unwrap();
        let texts = answers(&tokenizer, &marked);
        assert_eq!(texts.len(), 1);
        assert!(texts[0].starts_with("there was a cat."), "{texts:?}");
        assert_eq!(marked.tokens.len(), marked.is_target.len());
    }
}
