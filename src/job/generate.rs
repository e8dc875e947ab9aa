//! `prune generate`: each model is opened and checked, then loaded, then continues the prompt.

use std::sync::Arc;

use anyhow::{Context, Result};

use super::opened::OpenedModel;
use super::recorder::Recorder;
use super::weight_choice::{self, MemoryRoom, SettledWeights};
use crate::bytes::ByteSize;
use crate::data::{ChatTemplate, TextStream, Tokenizer};
use crate::failure::Failure;
use crate::generation::{
    DecodingArithmetic, Generated, GenerationRequest, Generator, Sampler, Sampling, SequenceShape,
    decoding_speed, generate as write, stop_ids, stop_warning,
};
use crate::linalg::Products;
use crate::model::{WeightForms, footprint};
use crate::placement::{DeviceMap, Residency, USABLE, inventory};
use crate::report::three_digits;
use crate::run::plan::exceeded;
use crate::run::{DecodingSpeed, Events, GenerationReport, Phase};
use crate::runtime::memory;
use crate::settings::{
    ComputeDtype, DeviceChoice, DeviceMapChoice, DeviceSettings, GenerateSettings, ModelSettings,
};

/// Takes parts of a text as they are written; returns whether a reader is left.
pub type TextSink<'a> = &'a mut (dyn FnMut(&str) -> bool + Send);

/// Lets each model continue the prompt. With a `sink` the text is also streamed, labelled where there are several models.
///
/// # Errors
/// Fails for contradictory flags, for everything a model's folder can lack, for a prompt that does not fit the model, and where
/// the memory does not hold a single layer.
pub fn generate(
    settings: &GenerateSettings,
    events: &dyn Events,
    mut sink: Option<TextSink<'_>>,
) -> Result<GenerationReport> {
    let recorder = Recorder::new(events);
    check(settings, &recorder)?;
    // All models are checked before the first model writes.
    let models = settings.models.iter();
    let writers =
        models.map(|model| Writer::open(settings, model, &recorder)).collect::<Result<Vec<_>>>()?;
    let are_labelled = writers.len() > 1;
    let mut reports = Vec::new();
    for writer in writers {
        if let Some(sink) = sink.as_mut().filter(|_| are_labelled) {
            let gap = if reports.is_empty() { "" } else { "\n" };
            sink(&format!("{gap}== {}\n", writer.name()));
        }
        reports.push(writer.write(&settings.sampling, &recorder, &mut sink)?);
    }
    let mut reports = reports.into_iter();
    let mut report = reports.next().context("no model wrote")?;
    report.compare = reports.next().map(Box::new);
    Ok(report)
}

/// Refuses flags that `prune generate` does not follow.
fn check(settings: &GenerateSettings, events: &dyn Events) -> Result<()> {
    let device = &settings.device;
    if matches!(device.device, DeviceChoice::Cuda(_))
        || device.device_map != DeviceMapChoice::Named(DeviceMap::Auto)
    {
        return Err(Failure::usage("prune generate computes on the CPU")
            .hint("leave --device and --device-map out")
            .into());
    }
    let dtypes = settings.models.iter().map(|model| model.dtype);
    for dtype in dtypes {
        let name = match dtype {
            ComputeDtype::Auto | ComputeDtype::F32 | ComputeDtype::Bf16 => continue,
            ComputeDtype::Bf16x3 => "bf16x3",
            ComputeDtype::F16 => "f16",
        };
        return Err(Failure::usage(format!(
            "--dtype {name}: prune generate computes in f32 or bf16"
        ))
        .hint("leave --dtype out, or use --dtype bf16")
        .into());
    }
    let sampling = &settings.sampling;
    if sampling.temperature == 0.0 && (sampling.top_p.is_some() || sampling.top_k.is_some()) {
        events.warn(
            "--top-p and --top-k have no effect at --temperature 0, which draws nothing"
                .to_string(),
        );
    }
    Ok(())
}

/// A model before its layers are read.
struct Writer {
    model: OpenedModel,
    tokenizer: Tokenizer,
    /// The input of the model; with a chat template the rendered text.
    prompt: String,
    prompt_ids: Vec<u32>,
    stop_ids: Vec<u32>,
    max_tokens: usize,
    budget: Option<ByteSize>,
    residency: Residency,
    arithmetic: DecodingArithmetic,
    bench: bool,
}

impl Writer {
    /// Opens the checkpoint, turns the prompt into tokens, and settles where the layers rest.
    ///
    /// # Errors
    /// Fails for everything that is missing or does not fit, before a layer is read.
    fn open(
        settings: &GenerateSettings,
        model: &ModelSettings,
        events: &dyn Events,
    ) -> Result<Self> {
        let asks_for_bf16 = model.dtype == ComputeDtype::Bf16;
        let mut model = OpenedModel::open(model, &settings.device, None, events)?;
        model.check_ends(events)?;
        let tokenizer = model.tokenizer(events)?;
        let of_model = stop_ids(&model.folder, tokenizer.id_of("</s>"))?;
        if let Some(warning) = stop_warning(&model.folder) {
            events.warn(warning);
        }
        let prompt = settings.prompt.as_str();
        let (prompt, prompt_ids) = if settings.chat {
            let template = ChatTemplate::load(&model.folder)?;
            let text = template.render(settings.system.as_deref(), prompt)?;
            let ids = tokenizer.encode_plain(&text)?;
            (text, ids)
        } else {
            (
                prompt.to_string(),
                without_end(tokenizer.encode(prompt)?, prompt, &tokenizer, &of_model)?,
            )
        };
        model.check_ids(&prompt_ids, &tokenizer, "prompt")?;
        let stop_ids = if settings.ignore_eos { Vec::new() } else { of_model };
        let max_tokens = settings.max_tokens;
        let request = GenerationRequest { prompt: &prompt_ids, max_tokens, stop_ids: &stop_ids };
        let capacity = request.capacity(model.config.max_position_embeddings)?;
        memory::release_freed();
        let held = memory::resident().map_or(ByteSize::ZERO, |resident| resident.anonymous);
        let budget = budget(&settings.device, held);
        let arithmetic = DecodingArithmetic {
            products: if asks_for_bf16 { model.products } else { Products::F32 },
            activations: settings.weights.activations,
            cache: settings.decoding.kv_cache,
        };
        let shape = SequenceShape { capacity, threads: model.threads, arithmetic };
        let sizes = Generator::sizes(&model.config, model.dtypes(), shape, held);
        let budget_or_all = budget.unwrap_or(ByteSize(u64::MAX));
        let room = MemoryRoom { sizes, budget: budget_or_all, capacity };
        let SettledWeights { forms, residency } =
            weight_choice::settle(&model, settings, arithmetic, room, events)?;
        if settings.bench && residency.streamed() > 0 {
            return Err(Failure::new(format!(
                "--bench: {} of {} layers do not fit into memory and are read from disk for every token",
                residency.streamed(),
                residency.layers()
            ))
            .hint("allow more memory with --max-memory, or leave --bench out")
            .into());
        }
        model.forms = Arc::new(forms);
        Ok(Self {
            model,
            tokenizer,
            prompt,
            prompt_ids,
            stop_ids,
            max_tokens,
            budget,
            residency,
            arithmetic,
            bench: settings.bench,
        })
    }

    /// The model, as it is labelled.
    fn name(&self) -> String {
        self.model.folder.display().to_string()
    }

    /// Reads the layers and lets the model write.
    ///
    /// # Errors
    /// Fails when a layer cannot be read, and where logits are not finite.
    fn write(
        self,
        sampling: &Sampling,
        recorder: &Recorder<'_>,
        sink: &mut Option<TextSink<'_>>,
    ) -> Result<GenerationReport> {
        self.announce(recorder);
        let clock = &self.model.clock;
        let mut generator = clock.measure(Phase::Read, || {
            Generator::load(self.model.layers(), self.residency, recorder)
        })?;
        generator = generator.with_arithmetic(self.arithmetic);
        let mut text = String::new();
        let request = GenerationRequest {
            prompt: &self.prompt_ids,
            max_tokens: self.max_tokens,
            stop_ids: &self.stop_ids,
        };
        let mut show = |part: &str| {
            text += part;
            sink.as_mut().is_none_or(|sink| sink(part))
        };
        let mut stream = TextStream::after(&self.tokenizer, &self.prompt_ids)?;
        let written = clock.measure(Phase::Generate, || {
            let mut sampler = Sampler::new(sampling);
            write(&mut generator, &request, &mut sampler, |id| Ok(show(&stream.push(id)?)))
        })?;
        show(&stream.finish()?);
        if let Some(sink) = sink {
            sink("\n");
        }
        let peak = clock.report().iter().filter_map(|phase| phase.peak_anonymous).max();
        recorder.note(self.statistics(&written, peak));
        let planned = (self.budget, self.residency.predicted());
        if let Some(warning) = peak.and_then(|peak| exceeded("memory", peak, planned)) {
            recorder.warn(warning);
        }
        let rate = written.rate().filter(|_| self.bench);
        let decoding = rate.map(|rate| self.decoding(&generator, rate, recorder));
        Ok(GenerationReport {
            decoding,
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
            weights: self.model.forms.form().name().to_string(),
            head: self.model.forms.head().name().to_string(),
            kv_cache: self.arithmetic.cache.name().to_string(),
            layers_in_memory: self.residency.resident(),
            layers_streamed: self.residency.streamed(),
            budget: self.budget,
            predicted: self.residency.predicted(),
            peak_anonymous: peak,
            threads: self.model.threads,
            warnings: recorder.warnings(),
            compare: None,
        })
    }

    /// Tells the place of the layers before they are read.
    fn announce(&self, events: &dyn Events) {
        let (layers, streamed) = (self.residency.layers(), self.residency.streamed());
        let allowed = self.budget.map_or_else(String::new, |budget| {
            format!("; {} of {budget} are needed", self.residency.predicted())
        });
        if streamed == 0 {
            events.note(format!("layers       {layers} in memory{allowed}"));
        } else {
            events.warn(format!(
                "{} of {layers} layers fit into memory, {streamed} are read from disk for every token{allowed}",
                self.residency.resident()
            ));
        }
    }

    /// Compares the speed with the memory's, and tells it.
    fn decoding(
        &self,
        generator: &Generator,
        tokens_per_second: f64,
        events: &dyn Events,
    ) -> DecodingSpeed {
        let (config, dtypes) = (&self.model.config, self.model.dtypes());
        let matrices = WeightForms::dense().layer_bytes(config, dtypes.layers);
        let dense = ByteSize(matrices.0 * config.num_hidden_layers as u64)
            + footprint::head_weight(config, dtypes.head);
        let speed = decoding_speed(generator, tokens_per_second, dense);
        let gb = |bytes: f64| three_digits(bytes / 1e9);
        events.note(format!(
            "decoding     {} tokens/s: {} per token at {} GB/s, {:.0} % of the {} GB/s of a loop that only reads",
            three_digits(tokens_per_second),
            speed.bytes_per_token,
            gb(speed.bytes_per_second),
            100.0 * speed.share,
            gb(speed.read_loop_bytes_per_second)
        ));
        events.note(format!(
            "limit        {} tokens/s at the rate of that loop; {} tokens/s with all zeros stored",
            three_digits(speed.limit_tokens_per_second),
            three_digits(speed.dense_limit_tokens_per_second)
        ));
        speed
    }

    fn statistics(&self, written: &Generated, peak: Option<ByteSize>) -> String {
        let prompt = self.prompt_ids.len();
        let mut line = format!(
            "prompt {prompt} tokens {} tokens/s, generated {} tokens",
            three_digits(written.prompt_rate(prompt)),
            written.ids.len()
        );
        if let Some(rate) = written.rate() {
            line += &format!(" {} tokens/s", three_digits(rate));
        }
        line += &format!(", finish: {}", written.finish.name());
        if let Some(peak) = peak {
            line += &format!(", peak memory {peak}");
        }
        line
    }
}

/// The memory that may be used, what the process holds included.
fn budget(device: &DeviceSettings, held: ByteSize) -> Option<ByteSize> {
    let given = device.budget().cpu();
    given.or_else(|| {
        let available = inventory::available_memory()?;
        Some(ByteSize((available.0 as f64 * USABLE) as u64) + held)
    })
}

/// Removes the end-of-text token that some tokenizers append to every text.
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
