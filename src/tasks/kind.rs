//! A task as data: its files, its few-shot draws, and the function from a row to a question.

use super::row::TaskRow;
use crate::failure::Failure;

/// A multiple-choice task.
#[derive(Debug, Clone, Copy)]
pub struct TaskKind {
    /// The name on the command line, and of the folder of its files.
    pub name: &'static str,
    /// The repository of the data set on the hub.
    pub repository: &'static str,
    /// Its configuration; `None` where it has one, and where each subject is one.
    pub config: Option<&'static str>,
    /// The split whose questions are asked.
    pub evaluated: &'static str,
    /// The split of examples.
    pub examples: &'static str,
    pub(super) draws: ExampleDraws,
    /// Accuracy by log-likelihood per character is reported, too.
    pub has_acc_norm: bool,
    pub(super) question: fn(&TaskRow) -> Result<Question, Failure>,
}

/// The way of drawing n examples for a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExampleDraws {
    /// n rows.
    Exactly,
    /// n + 1 rows, of which the first n that are not the question itself are taken: tasks without a test split.
    OneMore,
    /// The first n rows of the split, always the same.
    First,
}

/// A question: texts before an answer, and answers. Either all choices share a context, or they share the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// One context, or one per choice.
    pub contexts: Vec<String>,
    /// One answer per choice, or a single one; without the space before it.
    pub answers: Vec<String>,
    /// The right choice.
    pub target: usize,
}

impl Question {
    pub(super) fn of_choices(context: String, choices: &[&str], target: usize) -> Self {
        let answers = choices.iter().map(|choice| choice.to_string()).collect();
        Self { contexts: vec![context], answers, target }
    }

    /// The number of choices.
    pub fn choices(&self) -> usize {
        self.contexts.len().max(self.answers.len())
    }

    /// Context and answer of a choice.
    pub fn choice(&self, choice: usize) -> (&str, &str) {
        let of = |texts: &[String]| choice.min(texts.len() - 1);
        (&self.contexts[of(&self.contexts)], &self.answers[of(&self.answers)])
    }

    /// Characters (Unicode code points) of the text that names a choice, for accuracy per character.
    pub(super) fn characters(&self, choice: usize) -> usize {
        let (context, answer) = self.choice(choice);
        let name = if self.answers.len() > 1 { answer } else { context };
        name.chars().count()
    }

    /// Bytes of its texts.
    pub(super) fn text_bytes(&self) -> usize {
        self.contexts.iter().chain(&self.answers).map(String::len).sum()
    }

    /// The question with its right answer, as an example before a question.
    pub(super) fn as_example(&self) -> String {
        let (context, answer) = self.choice(self.target);
        format!("{context}{DELIMITER}{answer}\n\n")
    }

    /// The same question after a text.
    pub(super) fn after(mut self, before: &str) -> Self {
        for context in &mut self.contexts {
            context.insert_str(0, before);
        }
        self
    }
}

/// The text between context and answer.
pub(super) const DELIMITER: &str = " ";
