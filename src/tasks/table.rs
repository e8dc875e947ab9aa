//! The table of tasks, and the names of tasks on the command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::kind::TaskKind;
use super::kinds::{arc, boolq, hellaswag, mmlu, openbookqa, own, piqa, rte, winogrande};

/// All tasks. The first seven are the tasks of the original's `--eval_zero_shot`, in its order.
pub const TASKS: [&TaskKind; 9] = [
    &boolq::BOOLQ,
    &rte::RTE,
    &hellaswag::HELLASWAG,
    &winogrande::WINOGRANDE,
    &arc::ARC_EASY,
    &arc::ARC_CHALLENGE,
    &openbookqa::OPENBOOKQA,
    &piqa::PIQA,
    &mmlu::MMLU,
];

/// The number of tasks of the original's `--eval_zero_shot`.
pub const ZERO_SHOT: usize = 7;

/// A task as asked for: a name of [`TASKS`], or NAME=FILE for a user's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskSpec {
    /// The name.
    pub name: String,
    /// The file of a user's own task.
    pub file: Option<PathBuf>,
}

impl TaskSpec {
    /// The form of the task.
    pub(super) fn kind(&self) -> &'static TaskKind {
        let known = TASKS.into_iter().find(|kind| kind.name == self.name && self.file.is_none());
        known.unwrap_or(&own::OWN)
    }
}

impl FromStr for TaskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((name, file)) = text.split_once('=') {
            let is_name =
                |of: char| of.is_ascii_alphanumeric() || of == '_' || of == '-' || of == '.';
            if TASKS.iter().any(|kind| kind.name == name) {
                return Err(format!(
                    "`{name}` has questions of its own; name your file my-{name}=FILE"
                ));
            }
            return match !name.is_empty() && name.chars().all(is_name) && !file.is_empty() {
                true => Ok(Self { name: name.to_string(), file: Some(file.into()) }),
                false => Err("a task of your own is NAME=FILE, like my=questions.jsonl".into()),
            };
        }
        match TASKS.iter().any(|kind| kind.name == text) {
            true => Ok(Self { name: text.to_string(), file: None }),
            false => {
                let names: Vec<&str> = TASKS.iter().map(|kind| kind.name).collect();
                Err(format!("the tasks are {}, and NAME=FILE for your own", names.join(", ")))
            }
        }
    }
}

impl fmt::Display for TaskSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(formatter, "{}={}", self.name, file.display()),
            None => formatter.write_str(&self.name),
        }
    }
}

impl Serialize for TaskSpec {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// A limit of the questions of a task: a number, or a share below 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct QuestionLimit(f64);

impl QuestionLimit {
    /// The limit needs the number of all questions: it is a share.
    pub fn is_share(self) -> bool {
        self.0 < 1.0
    }

    /// The questions that are asked of this many.
    pub fn of(self, questions: usize) -> usize {
        let limit = match self.is_share() {
            true => (questions as f64 * self.0).ceil(),
            false => self.0.floor(),
        };
        questions.min(limit as usize)
    }
}

impl FromStr for QuestionLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|limit: &f64| limit.is_finite() && *limit > 0.0);
        number.map(Self).ok_or_else(|| "it is no number above 0".to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_have_names_and_limits_are_numbers_or_shares() {
        assert_eq!("boolq".parse::<TaskSpec>().unwrap().kind().name, "boolq");
        assert_eq!("my=x.jsonl".parse::<TaskSpec>().unwrap().kind().name, "own");
        assert_eq!("my=a/b.jsonl".parse::<TaskSpec>().unwrap().to_string(), "my=a/b.jsonl");
        for wrong in ["", "bool", "=x", "a b=x", "my=", "boolq=x.jsonl"] {
            assert!(wrong.parse::<TaskSpec>().is_err(), "{wrong}");
        }
        let of = |limit: &str, questions| limit.parse::<QuestionLimit>().unwrap().of(questions);
        assert_eq!((of("7", 40), of("0.33", 40), of("50", 40), of("1", 40)), (7, 14, 40, 1));
        assert!("0".parse::<QuestionLimit>().is_err());
    }
}
