//! The places of the answers in a rendered conversation.
//!
//! A template with `{% generation %}` marks states them. For any other template they are found by difference, in bytes of the whole
//! rendered conversation W. For the answer i, the template renders four more texts:
//!
//! ```text
//! H = messages before i                      the template may end this text with an end E of its own
//! G = H with the place of an answer          E or not, then the header of an answer
//! P = W with a probe as content of i         what stands before and after a content
//! R = messages up to i, with the probe       the same where no message follows
//! ```
//!
//! An answer begins after the header: where G ends if W begins with G, else after the header's last appearance before the content. It ends
//! where the texts after the content in P and in R first differ: the end of the turn is common to both, the next header or the end E is
//! not. The last answer ends before E, which is sought in the messages before all answers that stand in a row with it. So templates may
//! end every text, decorate the last answer alone, or remove thoughts from earlier answers. Borders of texts that differ within a token move to its first byte.

use std::ops::Range;

use anyhow::Result;

use super::chat::{Beginning, PROBE, RenderedText};
use super::conversation::Conversation;
use super::{ChatTemplate, Tokenizer};

/// The shortest part of a header that is sought.
const SHORTEST_HEADER: usize = 3;
/// The longest text between the messages before an answer and its content, where there is no header.
const LONGEST_GAP: usize = 256;

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AnswerPlaces {
    pub(super) text: String,
    /// The bytes of the answers, in order.
    pub(super) places: Vec<Range<usize>>,
    /// Answers without a byte.
    pub(super) unmatched: usize,
}

/// Renders a conversation and finds its answers. Fails when the template refuses the conversation, and when tokenizing fails.
pub(super) fn find_answers(
    conversation: &Conversation,
    tokenizer: &Tokenizer,
    chat: &ChatTemplate,
) -> Result<AnswerPlaces> {
    let messages = conversation.messages.len();
    let plain = |messages, is_answered| Beginning { messages, is_answered, probed: None };
    let mut beginnings = vec![plain(messages, false)];
    let has_marks = chat.has_marks(conversation);
    let answers: Vec<usize> = conversation.answers().collect();
    if has_marks {
        beginnings.push(plain(conversation.answers_from, false));
    } else {
        for &answer in &answers {
            let probed = |messages| Beginning { probed: Some(answer), ..plain(messages, false) };
            beginnings.extend([
                plain(answer, false),
                plain(answer, true),
                probed(messages),
                probed(answer + 1),
            ]);
        }
    }
    let mut rendered = chat.render_beginnings(conversation, &beginnings)?.into_iter();
    let whole = rendered.next().flatten();
    let Some(RenderedText { text, marked }) = whole else {
        return Ok(AnswerPlaces { text: String::new(), places: Vec::new(), unmatched: 0 });
    };
    if has_marks {
        // The marks of a prompt are not of its completion.
        let prompt = rendered.next().flatten().filter(|_| conversation.answers_from > 0);
        let of_prompt = prompt.map_or(0, |prompt| prompt.marked.len());
        let marked = marked.into_iter().skip(of_prompt);
        let places = marked.map(|(begin, end)| begin..end).collect();
        return Ok(AnswerPlaces { text, places, unmatched: 0 });
    }
    let rendered: Vec<Option<String>> =
        rendered.map(|beginning| beginning.map(|beginning| beginning.text)).collect();
    let (mut places, mut unmatched): (Vec<Range<usize>>, usize) = (Vec::new(), 0);
    let mut last: Option<(usize, Option<&str>)> = None;
    for (&answer, texts) in answers.iter().zip(rendered.as_chunks::<4>().0) {
        let [before, prompt, probed, cut] = texts.each_ref().map(Option::as_deref);
        let before_answers = match last {
            Some((before_it, first)) if before_it + 1 == answer => first,
            _ => before,
        };
        last = Some((answer, before_answers));
        let earlier = places.last().map_or(0, |place| place.end);
        let difference =
            Difference { whole: &text, earlier, before, before_answers, prompt, tokenizer };
        let is_last = answer + 1 == messages;
        let place = difference.place(probed, cut, is_last)?;
        unmatched += usize::from(place.is_empty());
        // An answer that is not found ends the text; it would hide those after it.
        if place.start < text.len() {
            places.push(place);
        }
    }
    Ok(AnswerPlaces { text, places, unmatched })
}

/// The texts that show an answer.
struct Difference<'a> {
    whole: &'a str,
    /// The end of the answer before this one.
    earlier: usize,
    /// The messages before the answer.
    before: Option<&'a str>,
    /// The messages before the answers that stand in a row with this one. A template may decorate the last answer of `before`.
    before_answers: Option<&'a str>,
    /// The messages before the answer with the place of the answer.
    prompt: Option<&'a str>,
    tokenizer: &'a Tokenizer,
}

impl Difference<'_> {
    fn place(
        &self,
        probed: Option<&str>,
        cut: Option<&str>,
        is_last: bool,
    ) -> Result<Range<usize>> {
        let (before_content, after_content) = match probed.and_then(|text| text.split_once(PROBE)) {
            Some((before, after)) => (Some(before), Some(after)),
            None => (None, None),
        };
        let start = self.start(before_content)?;
        // The content ends where the rest of the text is the same without it.
        let after = after_content.unwrap_or_default();
        let matched = common_end(self.whole, after).min(self.whole.len() - start);
        let content_end = match after_content {
            Some(_) => self.whole.len() - matched,
            None => start,
        };
        // Tool calls that follow a content may begin with a line end that they do not have alone.
        let glue = after.get(..after.len() - matched).unwrap_or_default();
        let end = if is_last {
            self.whole.len() - self.end_of_text()?
        } else {
            let rest = &self.whole[content_end..];
            let cut = cut.map(|cut| match cut.split_once(PROBE) {
                Some((_, after)) => after.strip_prefix(glue).unwrap_or(after),
                None => cut.get(start..).unwrap_or_default(),
            });
            content_end + self.common(rest, cut.unwrap_or_default())?
        };
        Ok(start..end.max(start))
    }

    /// The first byte after the header.
    fn start(&self, before_content: Option<&str>) -> Result<usize> {
        let Some(prompt) = self.prompt else {
            return Ok(
                before_content.map_or(self.whole.len(), |text| common_start(text, self.whole))
            );
        };
        // Some templates render nothing, and no place of an answer, where no message stands before it.
        if self.whole.starts_with(prompt) && !prompt.is_empty() {
            return Ok(prompt.len());
        }
        let most = before_content.map_or(self.whole.len(), |text| common_start(text, self.whole));
        if prompt.is_empty() {
            return Ok(most);
        }
        let before = self.before.unwrap_or_default();
        let shared = common_start(prompt, self.whole);
        if self.whole.starts_with(before) && shared > before.len() {
            // The header itself is rendered in two ways.
            return Ok(self.common(prompt, self.whole)?.min(most));
        }
        let header = prompt.get(common_start(prompt, before)..).unwrap_or_default();
        let ends = header.char_indices().map(|(at, c)| at + c.len_utf8()).rev();
        for end in ends.filter(|end| *end >= SHORTEST_HEADER) {
            if let Some(at) = self.whole[..most].rfind(&header[..end]) {
                return Ok(at + end);
            }
        }
        if !header.is_empty() {
            return Ok(most);
        }
        // Without a header, the answer begins where the messages before it end.
        let shared = self.common(before, self.whole)?;
        Ok(match self.whole.ends_with(&before[shared..]) {
            true => shared.min(most),
            // A message before the answer is rendered differently where no message follows. Its end is the same.
            false => {
                let first = most.saturating_sub(LONGEST_GAP).max(self.earlier).min(most);
                let ends = (first..=most).filter(|end| self.whole.is_char_boundary(*end));
                ends.max_by_key(|end| common_end(before, &self.whole[..*end])).unwrap_or(most)
            }
        })
    }

    /// Bytes of the end that the template gives to every text, whatever its last message is.
    fn end_of_text(&self) -> Result<usize> {
        let before = self.before_answers.filter(|before| !self.whole.starts_with(before));
        let Some(before) = before else {
            return Ok(0);
        };
        let end = &before[self.common(before, self.whole)?..];
        Ok(if self.whole.ends_with(end) { end.len() } else { 0 })
    }

    /// Bytes of the tokens that are equal at the beginning of both texts.
    fn common(&self, one: &str, other: &str) -> Result<usize> {
        // Both in full: tokens are compared only where the texts differ.
        let shared = common_start(one, other);
        if shared == one.len() || shared == other.len() {
            return Ok(shared);
        }
        let (tokens, bytes) = self.tokenizer.encode_with_places(one)?;
        let (others, _) = self.tokenizer.encode_with_places(other)?;
        let equal = tokens.iter().zip(&others).take_while(|(one, other)| one == other).count();
        Ok(bytes.get(equal).map_or(one.len(), |(begin, _)| *begin).min(shared))
    }
}

/// Bytes that are equal at the beginning of both texts; whole characters.
fn common_start(one: &str, other: &str) -> usize {
    let pairs = one.chars().zip(other.chars());
    pairs.take_while(|(one, other)| one == other).map(|(one, _)| one.len_utf8()).sum()
}

/// Bytes that are equal at the end of both texts; whole characters.
fn common_end(one: &str, other: &str) -> usize {
    let pairs = one.chars().rev().zip(other.chars().rev());
    pairs.take_while(|(one, other)| one == other).map(|(one, _)| one.len_utf8()).sum()
}
