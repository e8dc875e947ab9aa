//! `prune completions` and `prune man`: what a shell and `man` want to know, from clap's own description of the flags.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

use super::console::Console;

/// Shown below the flags.
pub(super) const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  prune completions bash > ~/.local/share/bash-completion/completions/prune
  prune completions zsh > ~/.zfunc/_prune
  prune completions fish > ~/.config/fish/completions/prune.fish";

/// Shown below the flags.
pub(super) const MAN_EXAMPLES: &str = "\
Examples:
  prune man | man -l -
  prune man > ~/.local/share/man/man1/prune.1";

/// Flags of `prune completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Prints a completion script.
pub fn completions(args: &CompletionsArgs, mut command: Command, console: &Console) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "prune", &mut script);
    console.result(&String::from_utf8_lossy(&script));
    Ok(())
}

/// Prints the man page: `prune` itself, then each command.
pub fn man(command: Command, console: &Console) -> Result<()> {
    let mut page = Vec::new();
    let mut command = command.disable_help_subcommand(true);
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    let commands = command.get_subcommands();
    for subcommand in commands.filter(|command| !command.is_hide_set()) {
        let name = format!("prune {}", subcommand.get_name());
        let man = clap_mangen::Man::new(subcommand.clone().name(name));
        man.render_name_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_options_section(&mut page)?;
    }
    console.result(&String::from_utf8_lossy(&page));
    Ok(())
}
