//! Command lines in messages, quoted so that a shell reads them back.

/// Returns a command line that a shell reads as these arguments.
pub fn quoted(arguments: &[String]) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-+=./:,@%".contains(c);
    let quoted = arguments.iter().map(|argument| {
        if !argument.is_empty() && argument.chars().all(is_plain) {
            argument.clone()
        } else {
            format!("'{}'", argument.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_command_line_is_what_was_typed() {
        let arguments = ["prune", "--save", "my out/7b", "--include", "*.q_proj", "it's", ""];
        let arguments = arguments.map(str::to_string);
        assert_eq!(
            quoted(&arguments),
            r"prune --save 'my out/7b' --include '*.q_proj' 'it'\''s' ''"
        );
    }
}
