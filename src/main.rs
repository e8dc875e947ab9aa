//! The binary: hands its arguments to [`prune::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    prune::cli::run(std::env::args_os())
}
