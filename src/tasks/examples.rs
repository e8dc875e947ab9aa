//! Few-shot examples: rows drawn as lm-evaluation-harness 0.4.13 draws them, with CPython's `random.sample`.

use super::kind::{ExampleDraws, TaskKind};
use super::row::{StoredRow, TaskRow};
use crate::data::PythonRandom;
use crate::failure::Failure;

/// The seed of every task's generator.
const SEED: u64 = 1234;

/// Few-shot examples for the questions of a task, in their order: the generator runs on from question to question.
pub(super) struct FewShotExamples<'a> {
    kind: &'a TaskKind,
    rows: &'a [StoredRow],
    count: usize,
    random: PythonRandom,
}

impl<'a> FewShotExamples<'a> {
    /// `count` examples per question, from the rows of the split of examples.
    ///
    /// # Errors
    /// Fails for fewer rows than a draw takes.
    pub(super) fn new(
        kind: &'a TaskKind,
        name: &str,
        rows: &'a [StoredRow],
        count: usize,
    ) -> Result<Self, Failure> {
        let needed = if count == 0 { 0 } else { drawn(kind, count) };
        if rows.len() < needed {
            return Err(Failure::new(format!(
                "--num-fewshot {count} draws {needed} examples of `{name}`, and there are {}",
                rows.len()
            ))
            .hint("ask for fewer examples, or add rows to the split of examples"));
        }
        Ok(Self { kind, rows, count, random: PythonRandom::new(SEED) })
    }

    /// The text of the examples before a question.
    ///
    /// # Errors
    /// Fails for an example that is no question of the task, and where too few rows differ from the question.
    pub(super) fn before(&mut self, question: &TaskRow) -> Result<String, Failure> {
        if self.count == 0 {
            return Ok(String::new());
        }
        let rows = self.rows;
        let asked = question.stored();
        let mut chosen: Vec<usize> = match self.kind.draws {
            ExampleDraws::First => (0..self.count).collect(),
            ExampleDraws::Exactly | ExampleDraws::OneMore => {
                sample(&mut self.random, rows.len(), drawn(self.kind, self.count))
            }
        };
        if self.kind.draws == ExampleDraws::OneMore {
            let differs = |row: &usize| !rows[*row].has_columns_of(&asked);
            chosen.retain(differs);
            if chosen.len() < self.count {
                // Several of them are the question: its copies are left out, and the draw is repeated.
                let others: Vec<usize> = (0..rows.len()).filter(differs).collect();
                if others.len() < self.count {
                    return Err(question
                        .failure(format!(
                            "{} examples differ from it, and --num-fewshot asks for {}",
                            others.len(),
                            self.count
                        ))
                        .hint("ask for fewer examples"));
                }
                let drawn = sample(&mut self.random, others.len(), self.count);
                chosen = drawn.into_iter().map(|at| others[at]).collect();
            }
            chosen.truncate(self.count);
        }
        let mut text = String::new();
        for row in chosen {
            text.push_str(&(self.kind.question)(&rows[row].row()?)?.as_example());
        }
        Ok(text)
    }
}

/// Rows of a draw for `count` examples.
fn drawn(kind: &TaskKind, count: usize) -> usize {
    match kind.draws {
        ExampleDraws::OneMore => count + 1,
        ExampleDraws::Exactly | ExampleDraws::First => count,
    }
}

/// `random.sample(range(from), count)` of CPython (`Lib/random.py`): a list where it is smaller than a set of the drawn numbers.
fn sample(random: &mut PythonRandom, from: usize, count: usize) -> Vec<usize> {
    let mut set_size = 21;
    if count > 5 {
        let mut power = 1;
        while power < 3 * count {
            power *= 4;
        }
        set_size += power;
    }
    if from <= set_size {
        let mut pool: Vec<usize> = (0..from).collect();
        // The last entry takes the place of the drawn entry.
        let draws = (0..count).map(|drawn| {
            let left = from - drawn;
            let at = random.below(left as u64) as usize;
            let last = pool[left - 1];
            std::mem::replace(&mut pool[at], last)
        });
        return draws.collect();
    }
    let mut chosen = Vec::with_capacity(count);
    while chosen.len() < count {
        let at = random.below(from as u64) as usize;
        if !chosen.contains(&at) {
            chosen.push(at);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    // random.seed(1234); [random.sample(range(N), n) for _ in range(3)] with CPython 3.11.
    #[test]
    fn samples_equal_cpythons() {
        let draws = |from: usize, count: usize| -> Vec<Vec<usize>> {
            let mut random = PythonRandom::new(SEED);
            (0..3).map(|_| sample(&mut random, from, count)).collect()
        };
        assert_eq!(draws(40, 2), [[28, 7], [0, 5], [37, 2]]);
        assert_eq!(draws(30, 3), [[24, 14, 3], [0, 2, 29], [25, 18, 1]]);
        assert_eq!(draws(11, 3), [[7, 1, 0], [1, 9, 0], [10, 1, 9]]);
    }
}
