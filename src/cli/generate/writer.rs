//! One model that is to write: opened and checked, then loaded, then writing.

use std::sync::Arc;

use anyhow::Result;

use super::GenerateArgs;
use crate::bytes::ByteSize;
use crate::checkpoint::WeightSource;
use crate::cli::args::{DeviceArgs, ModelArgs};
use crate::cli::console::Console;
use crate::cli::session::Session;
use crate::data::{ChatTemplate, TextStream, Tokenizer};
use crate::generation::{
    Generated, GenerationRequest, Generator, Sampler, Sampling, generate, stop_ids,
};
use crate::placement::planner::USABLE;
use crate::placement::{Budget, Residency, inventory};
use crate::run::{Events, GenerationReport, Phase};
use crate::runtime::memory;

/// A model before its layers are read.
pub(super) struct Writer {
    session: Session,
    tokenizer: Tokenizer,
    /// What the model is given, with a chat template the rendered text.
    prompt: String,
    prompt_ids: Vec<u32>,
    stop_ids: Vec<u32>,
    max_tokens: usize,
    budget: Option<ByteSize>,
    residency: Residency,
}

impl Writer {
    /// Opens the checkpoint, turns the prompt into tokens, and settles where the layers rest.
    ///
    /// # Errors
    /// Fails for everything that is missing or does not fit, before a layer is read.
    pub(super) fn open(
        args: &GenerateArgs,
        model: &ModelArgs,
        prompt: &str,
        console: &Console,
    ) -> Result<Self> {
        let session = Session::open(model, &args.device, None, console)?;
        session.check_ends(console)?;
        let tokenizer = session.tokenizer()?;
        let of_model = stop_ids(&session.folder, tokenizer.id_of("</s>"))?;
        let (prompt, prompt_ids) = if args.prompt.chat {
            let template = ChatTemplate::load(&session.folder)?;
            let text = template.render(args.prompt.system.as_deref(), prompt)?;
            let ids = tokenizer.encode_plain(&text)?;
            (text, ids)
        } else {
            (
                prompt.to_string(),
                without_end(tokenizer.encode(prompt)?, prompt, &tokenizer, &of_model)?,
            )
        };
        session.check_ids(&prompt_ids, &tokenizer, "prompt")?;
        let stop_ids = if args.sampling.ignore_eos {
            Vec::new()
        } else {
            of_model
        };
        let max_tokens = args.sampling.max_tokens as usize;
        let request = GenerationRequest {
            prompt: &prompt_ids,
            max_tokens,
            stop_ids: &stop_ids,
        };
        let capacity = request.capacity(session.config.max_position_embeddings)?;
        memory::release_freed();
        let held = memory::resident().map_or(ByteSize::ZERO, |resident| resident.anonymous);
        let sizes = Generator::sizes(
            &session.config,
            session.dtypes(),
            capacity,
            session.threads,
            held,
        );
        let budget = budget(&args.device, held);
        let residency = Residency::settle(&sizes, budget.unwrap_or(ByteSize(u64::MAX)))?;
        Ok(Self {
            session,
            tokenizer,
            prompt,
            prompt_ids,
            stop_ids,
            max_tokens,
            budget,
            residency,
        })
    }

    /// The model, as it is labelled.
    pub(super) fn name(&self) -> String {
        self.session.folder.display().to_string()
    }

    /// Reads the layers and lets the model write.
    ///
    /// # Errors
    /// Fails when a layer cannot be read, and where logits are not finite.
    pub(super) fn write(
        self,
        sampling: &Sampling,
        console: &Console,
        streams: bool,
    ) -> Result<GenerationReport> {
        self.announce(console);
        let source: Arc<dyn WeightSource> = self.session.checkpoint.clone();
        let clock = &self.session.clock;
        let mut generator = clock.measure(Phase::Read, || {
            let config = Arc::clone(&self.session.config);
            Generator::load(source, config, self.residency, console)
        })?;
        console.clear();
        let mut text = String::new();
        let request = GenerationRequest {
            prompt: &self.prompt_ids,
            max_tokens: self.max_tokens,
            stop_ids: &self.stop_ids,
        };
        let mut show = |part: &str| {
            text += part;
            !streams || console.stream(part)
        };
        let mut stream = TextStream::after(&self.tokenizer, &self.prompt_ids)?;
        let written = clock.measure(Phase::Generate, || {
            let mut sampler = Sampler::new(sampling);
            generate(&mut generator, &request, &mut sampler, |id| {
                Ok(show(&stream.push(id)?))
            })
        })?;
        show(&stream.finish()?);
        if streams {
            console.stream("\n");
        }
        let peak = clock
            .report()
            .iter()
            .filter_map(|phase| phase.peak_anonymous)
            .max();
        console.line(&self.statistics(&written, peak));
        Ok(GenerationReport {
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            model: self.name(),
            prompt_tokens_per_second: written.prompt_rate(self.prompt_ids.len()),
            tokens_per_second: written.rate(),
            prompt: self.prompt,
            text,
            prompt_ids: self.prompt_ids,
            ids: written.ids,
            finish: written.finish.name().to_string(),
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            seed: sampling.seed,
            layers_in_memory: self.residency.resident(),
            layers_streamed: self.residency.streamed(),
            budget: self.budget,
            predicted: self.residency.predicted(),
            peak_anonymous: peak,
            threads: self.session.threads,
            warnings: console.warnings(),
            compare: None,
        })
    }

    /// Where the layers rest, before they are read.
    fn announce(&self, console: &Console) {
        let (layers, streamed) = (self.residency.layers(), self.residency.streamed());
        let allowed = self.budget.map_or_else(String::new, |budget| {
            format!("; {} of {budget} are needed", self.residency.predicted())
        });
        if streamed == 0 {
            console.line(&format!("layers       {layers} in memory{allowed}"));
        } else {
            console.warn(format!(
                "{} of {layers} layers fit into memory, {streamed} are read from disk for every token{allowed}",
                self.residency.resident()
            ));
        }
    }

    fn statistics(&self, written: &Generated, peak: Option<ByteSize>) -> String {
        let prompt = self.prompt_ids.len();
        let mut line = format!(
            "prompt {prompt} tokens {} tokens/s, generated {} tokens",
            speed(written.prompt_rate(prompt)),
            written.ids.len()
        );
        if let Some(rate) = written.rate() {
            line += &format!(" {} tokens/s", speed(rate));
        }
        line += &format!(", finish: {}", written.finish.name());
        if let Some(peak) = peak {
            line += &format!(", peak memory {peak}");
        }
        line
    }
}

/// The memory that may be used, what the process holds included.
fn budget(device: &DeviceArgs, held: ByteSize) -> Option<ByteSize> {
    let given = device.max_memory.as_ref().and_then(Budget::cpu);
    given.or_else(|| {
        let available = inventory::available_memory()?;
        Some(ByteSize((available.0 as f64 * USABLE) as u64) + held)
    })
}

/// Where the tokenizer ends every text with a token that ends the model's, that token is no part of a prompt.
fn without_end(
    mut ids: Vec<u32>,
    prompt: &str,
    tokenizer: &Tokenizer,
    stop_ids: &[u32],
) -> Result<Vec<u32>> {
    if ids.last().is_some_and(|last| stop_ids.contains(last))
        && tokenizer.encode_plain(prompt)?.last() != ids.last()
        && ids.len() > 1
    {
        ids.pop();
    }
    Ok(ids)
}

/// Three digits are enough to compare.
fn speed(rate: f64) -> String {
    match rate {
        rate if rate >= 100.0 => format!("{rate:.0}"),
        rate if rate >= 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_have_three_digits() {
        assert_eq!(
            [1234.5, 100.0, 99.94, 9.994, 0.014].map(speed),
            ["1234", "100", "99.9", "9.99", "0.01"]
        );
    }
}
