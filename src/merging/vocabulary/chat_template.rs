//! The chat template of a merged model: the template most inputs have, a known format, or the recipe's own.

use std::path::Path;

use anyhow::Result;

use crate::data::ChatTemplate;
use crate::failure::Failure;

/// Known formats: the text before and after a message, around its role.
const FORMATS: [(&str, &str); 3] = [
    (
        "alpaca",
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% else %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    ),
    (
        "chatml",
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    (
        "llama3",
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ),
];

/// The template that a recipe names. `auto`: the template most `folders` use; on a tie, the first folder's. Else a known format, or
/// Jinja. `None` if `auto` finds no template.
///
/// # Errors
/// Fails for an unknown name, for text that is not Jinja, and for a damaged template of a model.
pub fn chat_template(asked: &str, folders: &[&Path]) -> Result<Option<String>> {
    if asked == "auto" {
        let mut counted: Vec<(String, usize)> = Vec::new();
        for folder in folders {
            let Some(template) = ChatTemplate::find(folder)? else {
                continue;
            };
            let text = template.text().trim();
            match counted.iter_mut().find(|(of, _)| of == text) {
                Some((_, count)) => *count += 1,
                None => counted.push((text.to_string(), 1)),
            }
        }
        // On a tie, `max_by_key` takes the last, so the order is reversed.
        let most = counted.into_iter().rev().max_by_key(|(_, count)| *count);
        return Ok(most.map(|(text, _)| text));
    }
    if let Some((_, text)) = FORMATS.iter().find(|(name, _)| *name == asked) {
        return Ok(Some((*text).to_string()));
    }
    let names = FORMATS.map(|(name, _)| format!("`{name}`")).join(", ");
    if !asked.contains('{') {
        return Err(Failure::new(format!(
            "the recipe's chat template `{asked}` is no known format and no Jinja"
        ))
        .hint(format!("write `auto`, {names} or a template"))
        .into());
    }
    ChatTemplate::check(asked)?;
    Ok(Some(asked.to_string()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder(config: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        folder
    }

    #[test]
    fn auto_is_the_template_of_most_models() {
        let of = |template: &str| folder(&format!(r#"{{"chat_template": "{template}"}}"#));
        let folders = [of("{{ 1 }}"), folder("{}"), of(" {{ 2 }}"), of("{{ 2 }} ")];
        let paths = folders.each_ref().map(|folder| folder.path());
        assert_eq!(chat_template("auto", &paths).unwrap().unwrap(), "{{ 2 }}");
        let first = chat_template("auto", &paths[..3]).unwrap();
        assert_eq!(first.unwrap(), "{{ 1 }}");
        assert_eq!(chat_template("auto", &paths[1..2]).unwrap(), None);
    }

    #[test]
    fn known_formats_are_templates() {
        for (name, expected) in [
            ("alpaca", "Be brief.\n\n### Instruction:\nHi\n\n### Response:\n"),
            (
                "chatml",
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            ),
            (
                "llama3",
                "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\
                 <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
                 <|start_header_id|>assistant<|end_header_id|>\n\n",
            ),
        ] {
            let text = chat_template(name, &[]).unwrap().unwrap();
            let config = serde_json::json!({"chat_template": text, "bos_token": "<s>"});
            let folder = folder(&config.to_string());
            let template = ChatTemplate::load(folder.path()).unwrap();
            let shown = template.render(Some("Be brief."), "Hi").unwrap();
            assert_eq!(shown, expected, "{name}");
        }
    }

    #[test]
    fn text_that_is_no_template_is_refused() {
        let refused = |text: &str| chat_template(text, &[]).unwrap_err().to_string();
        assert!(refused("chatlm").contains("no known format"));
        assert!(refused("{% for x in %}").contains("chat template"));
    }
}
