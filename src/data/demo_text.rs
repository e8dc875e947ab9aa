//! The text of `--dataset demo` and `--eval-dataset demo`: short stories, compressed into the program.
//!
//! `examples/train_demo` generates them; a test compares the assets with the generator.

use std::io::Read;

use anyhow::{Context, Result};
use flate2::read::GzDecoder;

use super::role::Role;

/// The text of a role, with a story on each line.
///
/// # Errors
/// Never for the assets of this program.
pub(super) fn text(role: Role) -> Result<String> {
    let packed: &[u8] = match role {
        Role::Calibration => include_bytes!("assets/calibration.txt.gz"),
        Role::Evaluation => include_bytes!("assets/test.txt.gz"),
    };
    let mut text = String::new();
    GzDecoder::new(packed).read_to_string(&mut text).context("unpacking the demo text")?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::digest;

    #[test]
    fn the_demo_text_is_the_one_that_its_model_was_measured_on() {
        // SHA-256 of the text that the generator of examples/train_demo makes; docs/datasets.md repeats them.
        for (role, sha256) in [
            (Role::Calibration, "2c4cd412d6c4150b42cd2b098ef82984427b45e1c3d3d6e0247563504804d2ee"),
            (Role::Evaluation, "67e8746647f19b97e14d54462e62c301d13a87246c85e0c33c6e6d28623cfa6a"),
        ] {
            let text = text(role).expect("unpack");
            assert_eq!(digest::of_bytes(text.as_bytes()), sha256, "{role:?}");
        }
    }
}
