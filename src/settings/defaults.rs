//! Defaults that several groups share, and the settings of a group without flags.

use clap::Args;

/// Pruning method by default.
pub const PRUNE_METHOD: &str = "wanda";
/// Calibration samples, as in the reference.
pub const NSAMPLES: u32 = 128;
/// Tokens per sample and window where the model allows as many: the context length of most published comparisons.
pub const SEQLEN: usize = 2048;
/// Calibration and evaluation text.
pub const DATASET: &str = "wikitext2";

/// The settings of a group as a command line with these flags has them.
pub(super) fn with_flags<T: Args>(flags: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("prune").no_binary_name(true));
    let matches = command.try_get_matches_from(flags);
    let settings = matches.and_then(|matches| T::from_arg_matches(&matches));
    settings.expect("the flags and their defaults are valid")
}

/// The settings of a group without any flag.
pub(super) fn without_flags<T: Args>() -> T {
    with_flags(&[])
}
