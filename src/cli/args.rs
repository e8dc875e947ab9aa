//! Flags of messages, and values of lists.

use std::fmt::Display;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::failure::Failure;

/// Message flags.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct MessageArgs {
    /// Print the result as one JSON object
    ///
    /// The object is the content of run.json, and replaces the table.
    #[arg(hide_short_help = true, long)]
    pub json: bool,

    /// Form of progress, on standard error
    ///
    /// `auto` draws bars on a terminal and writes a plain line now and then elsewhere. `json` writes one JSON object per line for
    /// every event, warnings and errors included.
    #[arg(hide_short_help = true, long, value_name = "HOW", default_value = "auto")]
    pub progress: ProgressArg,

    /// Only warnings, errors and the result
    #[arg(hide_short_help = true, short, long, conflicts_with = "verbose")]
    pub quiet: bool,

    /// Also every matrix, and memory after every layer
    #[arg(hide_short_help = true, short, long)]
    pub verbose: bool,
}

/// Forms of progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ProgressArg {
    /// Bars on a terminal, else plain lines
    #[default]
    Auto,
    /// Bars
    Bar,
    /// A line every ten seconds
    Plain,
    /// JSON lines
    Json,
}

/// The values of a list with commas.
///
/// # Arguments
/// * `flag`: the name of the flag, for errors
/// * `example`: a list to type, for errors
///
/// # Errors
/// Fails for an empty list, an empty value and a value that occurs twice, and as `parse`.
pub(super) fn from_list<T: PartialEq + Display>(
    flag: &str,
    example: &str,
    list: &str,
    parse: impl Fn(&str) -> std::result::Result<T, Failure>,
) -> Result<Vec<T>> {
    let mut values: Vec<T> = Vec::new();
    let texts: Vec<&str> = list.split(',').map(str::trim).collect();
    for (at, text) in texts.iter().enumerate() {
        if text.is_empty() {
            let message = match texts.len() {
                1 => format!("{flag} is empty"),
                of => format!("value {} of {of} of {flag} {list} is empty", at + 1),
            };
            return Err(Failure::usage(message)
                .hint(format!("write values separated by commas, like {flag} {example}"))
                .into());
        }
        let value = parse(text)?;
        if let Some(first) = values.iter().position(|other| *other == value) {
            let mut others = texts.clone();
            others.remove(at);
            return Err(Failure::usage(format!(
                "{flag} {list} has {value} twice, as values {} and {}",
                first + 1,
                at + 1
            ))
            .hint(format!("use {flag} {}", others.join(",")))
            .into());
        }
        values.push(value);
    }
    Ok(values)
}
