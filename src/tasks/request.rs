//! Requests: contexts and answers as token ids, as lm-evaluation-harness 0.4.13 makes them.
//!
//! 1. A context C and a continuation K: a space and the answer. Spaces at the end of C move to the front of K.
//! 2. The ids of K are the ids of C + K after as many as C has alone.
//! 3. A request's input is the last `max_length` + 1 ids without the last id. Beginnings are dropped first.

use anyhow::Result;

use super::kind::{DELIMITER, Question};
use super::python_text::rstrip;
use crate::data::Tokenizer;
use crate::failure::Failure;

/// A context with a continuation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoredRequest {
    /// Ids of the context, before truncation.
    pub context: Vec<u32>,
    /// Ids of the continuation.
    pub continuation: Vec<u32>,
}

impl ScoredRequest {
    /// The ids that pass the model, at most `max_length`: all but the last.
    pub fn input(&self, max_length: usize) -> Vec<u32> {
        let all = self.context.len() + self.continuation.len();
        let ids = self.context.iter().chain(&self.continuation).copied();
        ids.take(all - 1).skip((all - 1).saturating_sub(max_length)).collect()
    }
}

/// The way texts become ids.
#[derive(Clone, Copy)]
pub struct TaskTokens<'a> {
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// `--add-bos`; `None` leaves special tokens to the tokenizer.
    pub add_bos: Option<bool>,
    /// Ids of an input, at most.
    pub max_length: usize,
}

impl TaskTokens<'_> {
    /// The requests of a question, one per choice.
    ///
    /// # Errors
    /// Fails for a text that the tokenizer cannot express, a continuation without tokens, and one longer than the model's window.
    pub fn requests(&self, question: &Question) -> Result<Vec<ScoredRequest>> {
        let of_choice = |choice| -> Result<ScoredRequest> {
            let (context, answer) = question.choice(choice);
            self.request(context, &format!("{DELIMITER}{answer}"))
        };
        (0..question.choices()).map(of_choice).collect()
    }

    fn request(&self, context: &str, continuation: &str) -> Result<ScoredRequest> {
        let request = match context.is_empty() {
            true => ScoredRequest {
                context: vec![self.beginning()?],
                continuation: self.tokenizer.encode_plain(continuation)?,
            },
            false => {
                let mut whole = self.ids(&format!("{context}{continuation}"))?;
                let context = self.ids(rstrip(context))?;
                let continuation = whole.split_off(context.len().min(whole.len()));
                ScoredRequest { context, continuation }
            }
        };
        let tokens = request.continuation.len();
        if tokens == 0 || request.context.is_empty() {
            let what = if tokens == 0 { "an answer" } else { "a context" };
            return Err(Failure::new(format!("{what} has no tokens"))
                .hint("leave this question out")
                .into());
        }
        if tokens > self.max_length {
            return Err(Failure::new(format!(
                "an answer has {tokens} tokens, and the model's window has {}",
                self.max_length
            ))
            .hint("leave this question out")
            .into());
        }
        Ok(request)
    }

    /// The ids of a text. A text that begins with the token of a beginning gets no second one.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let begins = self.tokenizer.bos_text().is_some_and(|bos| text.starts_with(&bos));
        match self.add_bos {
            _ if begins => self.tokenizer.encode_plain(text),
            Some(false) => self.tokenizer.encode_plain(text),
            None => self.tokenizer.encode(text),
            Some(true) => {
                let mut ids = self.tokenizer.encode(text)?;
                let bos = self.beginning()?;
                if ids.first() != Some(&bos) {
                    ids.insert(0, bos);
                }
                Ok(ids)
            }
        }
    }

    /// The id before a continuation without a context.
    fn beginning(&self) -> Result<u32> {
        let id = self.tokenizer.bos().or(self.tokenizer.eos());
        Ok(id.ok_or_else(|| {
            Failure::new("the tokenizer has no token for the beginning of a text")
                .hint("give every question a context, and leave out --add-bos where it is given")
        })?)
    }
}
