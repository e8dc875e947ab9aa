//! `prune generate`: flags, and the text as it comes.

use std::fs::File;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelWordArgs;
use crate::bytes::{LARGEST_SETTINGS, read_up_to};
use crate::failure::Failure;
use crate::generation::Sampling;
use crate::hub::HubRepo;
use crate::input::{self, Expected};
use crate::job;
use crate::settings::{
    DecodingSettings, DeviceSettings, GenerateSettings, ModelSettings, WeightSettings,
};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune generate out/llama2-7b/model --prompt \"The capital of France is\"
  prune generate out/7b/model --compare models/Llama-2-7b-hf \\
        --prompt-file prompt.txt --max-tokens 200
  prune generate models/Llama-3.2-1B-Instruct --chat \\
        --prompt \"Why is the sky blue?\" --system \"Answer in one sentence.\" \\
        --temperature 0.7 --top-p 0.9 --seed 1
  prune generate out/7b/model --prompt \"Hello\" --json | jq -r .text";

/// The command of a message that asks for a model.
const EXAMPLE: &str = "prune generate out/7b/model --prompt \"Once upon a time\"";

/// Flags of `prune generate`.
#[derive(Debug, Clone, Args)]
#[command(
    mut_arg("hidden_states", |flag| flag.hide(true)),
    mut_arg("offload_folder", |flag| flag.hide(true)),
    mut_arg("json", |flag| flag.help("Print one JSON object at the end").long_help("Print one JSON object at the end, in place of the text as it comes"))
)]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelWordArgs,

    /// Another checkpoint that continues the same prompt
    ///
    /// Both texts are printed, labelled. The models are in memory one after the other.
    #[arg(long, value_name = "DIR|ID", help_heading = "Model")]
    compare: Option<PathBuf>,

    #[command(flatten)]
    prompt: PromptArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten, next_help_heading = "Writing")]
    weights: WeightSettings,

    #[command(flatten, next_help_heading = "Writing")]
    decoding: DecodingSettings,

    #[command(flatten)]
    device: DeviceSettings,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Prompt flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Prompt")]
struct PromptArgs {
    /// The beginning of the text, or with --chat the question
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// File to read the prompt from; `-` is standard input
    ///
    /// UTF-8. One line end at the end of the file is not part of the prompt.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// Put the prompt into the model's chat template, as a user's message [default: the prompt as it is]
    ///
    /// The template is `chat_template.jinja` of the model's folder, else `chat_template` of tokenizer_config.json. It brings the
    /// special tokens itself.
    #[arg(long)]
    chat: bool,

    /// The system's message before it [default: none, or the template's own]
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
}

/// Sampling flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Writing")]
struct SamplingArgs {
    /// New tokens, at most
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,

    #[command(flatten)]
    choice: Sampling,

    /// Write on where the model would end
    #[arg(long)]
    ignore_eos: bool,

    /// Compare the speed of decoding with the memory's; implies --ignore-eos
    ///
    /// Prints the bytes of weights that a token reads, the rate of a loop that only reads them with the same threads, and the tokens per
    /// second at that rate. All layers must be in memory.
    #[arg(long)]
    bench: bool,
}

/// Runs the command: the text goes to standard output as it comes, or a JSON object at the end.
pub fn command(args: &GenerateArgs, console: &Console) -> Result<()> {
    let settings = args.settings()?;
    if args.messages.json {
        let report = job::generate(&settings, console, None)?;
        return console.record(&report, "");
    }
    let mut sink = |part: &str| console.stream(part);
    job::generate(&settings, console, Some(&mut sink)).map(drop)
}

impl GenerateArgs {
    fn settings(&self) -> Result<GenerateSettings> {
        let mut models = vec![self.model.settings(EXAMPLE)?];
        let prompt = self.prompt.text()?;
        models.extend(self.other_model()?);
        Ok(GenerateSettings {
            models,
            device: self.device.clone(),
            prompt,
            chat: self.prompt.chat,
            system: self.prompt.system.clone(),
            sampling: self.sampling.choice,
            max_tokens: self.sampling.max_tokens as usize,
            ignore_eos: self.sampling.ignore_eos || self.sampling.bench,
            bench: self.sampling.bench,
            weights: self.weights,
            decoding: self.decoding,
        })
    }

    /// `--compare` as a model of its own.
    fn other_model(&self) -> Result<Option<ModelSettings>> {
        let Some(folder) = &self.compare else {
            return Ok(None);
        };
        if !folder.exists() && folder.to_str().and_then(HubRepo::model).is_none() {
            return Err(Failure::new(format!(
                "the folder of --compare, `{}`, does not exist",
                folder.display()
            ))
            .detail("neither is it an id on the hub, which is like meta-llama/Llama-2-7b-hf")
            .hint("--compare wants a checkpoint like --model: config.json, *.safetensors, tokenizer.json")
            .into());
        }
        Ok(Some(ModelSettings {
            model: folder.clone(),
            revision: None,
            ..self.model.flags.clone()
        }))
    }
}

impl PromptArgs {
    fn text(&self) -> Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(_), Some(_)) => Err(Failure::usage("--prompt and --prompt-file are both given")
                .hint("leave one of them out")
                .into()),
            (None, None) => Err(Failure::usage("--prompt is missing")
                .hint("write the text that the model continues, like --prompt \"Once upon a time\", or name a --prompt-file")
                .into()),
            (Some(prompt), None) => Ok(prompt.clone()),
            (None, Some(file)) => {
                let shown = file.display();
                let bytes = if file.as_os_str() == "-" {
                    read_up_to(std::io::stdin(), LARGEST_SETTINGS)
                } else {
                    File::open(file).and_then(|file| read_up_to(file, LARGEST_SETTINGS))
                };
                let bytes = bytes.and_then(|bytes| {
                    input::check(&bytes, Expected::Text, file)?;
                    Ok(bytes)
                });
                let bytes = bytes.map_err(|error| {
                    let failure =
                        Failure::new(format!("cannot read the prompt from `{shown}`: {error}"));
                    input::with_remedy(failure, &error)
                        .or_hint("--prompt-file wants a text file, or - for standard input")
                })?;
                let mut text = String::from_utf8(bytes).map_err(|error| {
                    Failure::new(format!(
                        "the prompt in `{shown}` is not UTF-8 from byte {} on",
                        error.utf8_error().valid_up_to()
                    ))
                })?;
                for end in ["\n", "\r"] {
                    if text.ends_with(end) {
                        text.pop();
                    }
                }
                Ok(text)
            }
        }
    }
}
