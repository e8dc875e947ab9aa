//! [`MappedRows`]: rows of an embedding or a head in the order of the output's vocabulary.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};

use super::rows::SourceRows;
use crate::merging::vocabulary::{RowMap, RowRule};

/// Elements that are read at a time for the mean of all rows.
const ELEMENTS_AT_A_TIME: usize = 1 << 16;

/// The rows of a source by the rules of a [`RowMap`]. A rule may name a row of any source.
pub struct MappedRows<'a> {
    map: Arc<RowMap>,
    /// The number of the source's model.
    model: usize,
    /// The rows of all sources, by number of their models.
    sources: Vec<(usize, Box<dyn SourceRows + 'a>)>,
    columns: usize,
    /// The mean of the rows of all tokens, once it was asked for.
    padding: OnceLock<Vec<f32>>,
}

impl<'a> MappedRows<'a> {
    /// The rows of the model number `model`.
    pub fn new(
        map: Arc<RowMap>,
        model: usize,
        sources: Vec<(usize, Box<dyn SourceRows + 'a>)>,
        columns: usize,
    ) -> Self {
        Self { map, model, sources, columns, padding: OnceLock::new() }
    }

    fn rules(&self) -> Result<&[RowRule]> {
        let rules = self.map.rules.get(&self.model);
        let rules = rules.with_context(|| format!("model {} has no rows", self.model))?;
        Ok(rules)
    }

    /// Reads successive rows of a source.
    fn read_rows(
        &self,
        model: usize,
        rows: Range<usize>,
        values: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let source = self.sources.iter().find(|(of, _)| *of == model);
        let (_, source) = source.with_context(|| format!("model {model} is no source"))?;
        source.read(rows, values, bytes)
    }

    /// Fills a row by a rule.
    fn put(&self, rule: RowRule, values: &mut [f32], bytes: &mut Vec<u8>) -> Result<()> {
        match rule {
            RowRule::Own(row) => self.read_one(self.model as u32, row, values, bytes)?,
            RowRule::Of { model, row } => self.read_one(model, row, values, bytes)?,
            RowRule::Zero => values.fill(0.0),
            RowRule::Mean(number) => {
                let rows = &self.map.means[number as usize];
                values.fill(0.0);
                let mut one = vec![0.0; self.columns];
                for &(model, row) in rows {
                    self.read_one(model, row, &mut one, bytes)?;
                    values.iter_mut().zip(&one).for_each(|(sum, value)| *sum += value);
                }
                let count = rows.len() as f32;
                values.iter_mut().for_each(|sum| *sum /= count);
            }
            RowRule::Padding => {
                if self.padding.get().is_none() {
                    // Two threads that come here have the same mean.
                    let _ = self.padding.set(self.mean(bytes)?);
                }
                let mean = self.padding.get().context("it was set")?;
                values.copy_from_slice(mean);
            }
        }
        Ok(())
    }

    fn read_one(
        &self,
        model: u32,
        row: u32,
        values: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let row = row as usize;
        self.read_rows(model as usize, row..row + 1, values, bytes)
    }

    /// The mean of the rows of all tokens, summed in f64 in their order.
    fn mean(&self, bytes: &mut Vec<u8>) -> Result<Vec<f32>> {
        let step = (ELEMENTS_AT_A_TIME / self.columns).max(1);
        let mut sums = vec![0.0f64; self.columns];
        let mut values = Vec::new();
        for first in (0..self.map.tokens).step_by(step) {
            let rows = first..(first + step).min(self.map.tokens);
            values.resize(rows.len() * self.columns, 0.0);
            self.read(rows, &mut values, bytes)?;
            for row in values.chunks(self.columns) {
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum += f64::from(*value);
                }
            }
        }
        let count = self.map.tokens as f64;
        Ok(sums.into_iter().map(|sum| (sum / count) as f32).collect())
    }
}

impl SourceRows for MappedRows<'_> {
    fn read(&self, rows: Range<usize>, values: &mut [f32], bytes: &mut Vec<u8>) -> Result<()> {
        let rules = &self.rules()?[rows];
        let mut at = 0;
        while at < rules.len() {
            // Successive rows of the source are read at once.
            let RowRule::Own(first) = rules[at] else {
                let place = at * self.columns..(at + 1) * self.columns;
                self.put(rules[at], &mut values[place], bytes)?;
                at += 1;
                continue;
            };
            let run = rules[at..].iter().zip(first..);
            let run = run.take_while(|(rule, row)| **rule == RowRule::Own(*row)).count();
            let place = at * self.columns..(at + run) * self.columns;
            let first = first as usize;
            self.read_rows(self.model, first..first + run, &mut values[place], bytes)?;
            at += run;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row r of source s is (10·s + r, −r).
    struct Numbers(usize);

    impl SourceRows for Numbers {
        fn read(&self, rows: Range<usize>, values: &mut [f32], _: &mut Vec<u8>) -> Result<()> {
            for (row, values) in rows.zip(values.chunks_mut(2)) {
                values.copy_from_slice(&[(10 * self.0 + row) as f32, -(row as f32)]);
            }
            Ok(())
        }
    }

    #[test]
    fn rows_come_by_their_rules_in_any_piece() {
        let rules = vec![
            RowRule::Own(2),
            RowRule::Own(3),
            RowRule::Of { model: 5, row: 1 },
            RowRule::Zero,
            RowRule::Mean(0),
            RowRule::Own(0),
            RowRule::Padding,
        ];
        let map = Arc::new(RowMap {
            tokens: 6,
            rules: [(1, rules)].into(),
            means: vec![vec![(1, 1), (5, 3)]],
            without_rows: Vec::new(),
        });
        let sources =
            vec![(1, Box::new(Numbers(1)) as Box<dyn SourceRows>), (5, Box::new(Numbers(5)))];
        let rows = MappedRows::new(map, 1, sources, 2);
        let mut whole = [9.0; 14];
        rows.read(0..7, &mut whole, &mut Vec::new()).unwrap();
        let expected = [12.0, -2.0, 13.0, -3.0, 51.0, -1.0, 0.0, 0.0, 32.0, -2.0, 10.0, 0.0];
        assert_eq!(whole[..12], expected);
        // (12 + 13 + 51 + 0 + 32 + 10) / 6 and −(2 + 3 + 1 + 0 + 2 + 0) / 6
        assert_eq!(whole[12..], [118.0 / 6.0, -8.0 / 6.0].map(|mean: f64| mean as f32));
        for at in 0..7 {
            let mut one = [9.0; 2];
            rows.read(at..at + 1, &mut one, &mut Vec::new()).unwrap();
            assert_eq!(one, whole[2 * at..2 * at + 2]);
        }
    }
}
