//! `adapter_config.json`: rank and scale of every module, and the refusal of adapters that are no change of weights.
//!
//! s = α / r, or α / √r with `use_rslora` (Kalajdzievski 2023, arXiv 2312.03732), in f64
//!
//! r and α of a module: the first entry of `rank_pattern` or `alpha_pattern` whose key matches the end of the
//! module's path, else `r` and `lora_alpha`. The two patterns are independent of one another, as in peft 0.21.2.
//!
//! The tensors in the file say which modules are changed. peft passes over factors of a module that a list of `target_modules` does not
//! name, so an adapter with such factors is refused: peft and this program would make different models.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use super::keys::inside;
use super::patterns::{MOST_KEYS, Patterns};
use crate::failure::Failure;
use crate::input::{InOrder, read_settings, with_remedy};

/// The name of the file in an adapter's folder.
pub(super) const CONFIG_FILE: &str = "adapter_config.json";

/// The largest rank that is read. Adapters have ranks of 4 to 1024; above this limit, factors are larger than the base's tensor.
pub(super) const MAX_RANK: usize = 16384;

/// Settings that make an adapter something else than a change of weights, and the reason.
const REFUSED: &[(&str, &str)] = &[
    ("layer_replication", "it repeats layers of its base"),
    ("target_parameters", "it changes parameters that are not the weight of a module"),
    ("use_qalora", "it fits only its quantised base"),
    ("alora_invocation_tokens", "it acts on some tokens only, so it cannot be added to weights"),
    (
        "arrow_config",
        "it chooses between adapters token by token, so it cannot be added to weights",
    ),
    ("use_bdlora", "its factors are block-diagonal"),
    ("kasa_config", "its initialisation changed the base"),
    ("megatron_config", "its weights are split over devices"),
];

/// The parts of the file that are read.
#[derive(serde::Deserialize)]
struct Raw {
    peft_type: Option<String>,
    base_model_name_or_path: Option<String>,
    r: Option<usize>,
    lora_alpha: Option<f64>,
    use_rslora: Option<bool>,
    use_dora: Option<bool>,
    ensure_weight_tying: Option<bool>,
    fan_in_fan_out: Option<bool>,
    init_lora_weights: Option<Value>,
    rank_pattern: Option<InOrder<usize>>,
    alpha_pattern: Option<InOrder<f64>>,
    trainable_token_indices: Option<Tokens>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// `trainable_token_indices`: rows of the embedding, or rows by the name of a module.
#[derive(Debug, Clone, serde::Deserialize)]
#[serde(untagged)]
enum Tokens {
    OfEmbedding(Vec<usize>),
    ByModule(BTreeMap<String, Vec<usize>>),
}

/// The file of an adapter that this program writes.
pub(super) fn written_config(
    base: Option<&str>,
    rank: usize,
    alpha: Value,
    target_modules: Value,
) -> Value {
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": true,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": target_modules,
        "use_rslora": false,
        "use_dora": false,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": false,
        "init_lora_weights": true,
    })
}

/// The checked settings of an adapter.
#[derive(Debug, Clone)]
pub(super) struct AdapterConfig {
    /// `base_model_name_or_path`.
    pub(super) base_model: Option<String>,
    /// Every module with factors has a magnitude vector.
    pub(super) use_dora: bool,
    /// `ensure_weight_tying`: embedding and head of a tied base stayed tied in training.
    pub(super) ensure_weight_tying: bool,
    /// `fan_in_fan_out`: the linears of the base are transposed, which holds for GPT-2 alone.
    pub(super) fan_in_fan_out: bool,
    use_rslora: bool,
    rank: usize,
    alpha: f64,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
    tokens: Option<Tokens>,
    /// The names in a list of `target_modules`; `None` for a pattern, and without the key.
    targets: Option<Vec<String>>,
}

impl AdapterConfig {
    /// Reads and checks the file of `folder`.
    ///
    /// # Errors
    /// Fails when the file is missing or not valid, is not of a LoRA, or has a setting that no change of weights can follow.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        const AGAIN: &str = "download the adapter again";
        let cannot = |why: String| {
            Failure::new(format!("cannot read `{}`", path.display())).detail(why).hint(AGAIN)
        };
        let text =
            read_settings(&path).map_err(|error| with_remedy(cannot(error.to_string()), &error))?;
        let raw = serde_json::from_str(&text).map_err(|error| cannot(error.to_string()))?;
        Self::check(raw, folder)
    }

    fn check(raw: Raw, folder: &Path) -> Result<Self> {
        let refused = |what: String, why: &str| {
            Failure::new(format!("the adapter `{}` cannot be merged: {what}", folder.display()))
                .detail(why)
        };
        match raw.peft_type.as_deref() {
            Some("LORA") => {}
            other => {
                let kind = other.unwrap_or("nothing");
                return Err(refused(
                    format!("its `peft_type` is `{kind}`"),
                    "only adapters of type `LORA` are read",
                )
                .into());
            }
        }
        for (name, why) in REFUSED {
            if raw.rest.get(*name).is_some_and(is_set) {
                return Err(refused(format!("it uses `{name}`"), why).into());
            }
        }
        if let Some(failure) = changed_base(raw.init_lora_weights.as_ref(), &refused) {
            return Err(failure.into());
        }
        let unusable = |key: &str, why: String| {
            let hint = "take the adapter from its author again; peft writes a key per module or a few expressions";
            refused(format!("its `{key}` cannot be used"), &why).hint(hint)
        };
        let ranks = raw.rank_pattern.map_or(Vec::new(), |all| all.0);
        let alphas = raw.alpha_pattern.map_or(Vec::new(), |all| all.0);
        if let Some(Tokens::ByModule(modules)) = &raw.trainable_token_indices
            && modules.len() > MOST_KEYS
        {
            let why = format!("it names {} modules; up to {MOST_KEYS} are read", modules.len());
            return Err(unusable("trainable_token_indices", why).into());
        }
        Ok(Self {
            base_model: raw.base_model_name_or_path,
            use_dora: raw.use_dora.unwrap_or(false),
            ensure_weight_tying: raw.ensure_weight_tying.unwrap_or(false),
            fan_in_fan_out: raw.fan_in_fan_out.unwrap_or(false),
            use_rslora: raw.use_rslora.unwrap_or(false),
            // The defaults of peft.
            rank: raw.r.unwrap_or(8),
            alpha: raw.lora_alpha.unwrap_or(8.0),
            ranks: Patterns::new(ranks).map_err(|why| unusable("rank_pattern", why))?,
            alphas: Patterns::new(alphas).map_err(|why| unusable("alpha_pattern", why))?,
            tokens: raw.trainable_token_indices,
            targets: raw.rest.get("target_modules").and_then(names),
        })
    }

    /// The rank r of `module` and its scale s.
    ///
    /// # Errors
    /// Fails when r is zero or impossibly large, and when s is not a positive number.
    pub(super) fn rank_and_scale(&self, module: &str) -> Result<(usize, f32), Failure> {
        let inside = inside(module);
        let rank = self.ranks.first_match(module).or_else(|| self.ranks.first_match(&inside));
        let alpha = self.alphas.first_match(module).or_else(|| self.alphas.first_match(&inside));
        let (rank, alpha) = (rank.unwrap_or(self.rank), alpha.unwrap_or(self.alpha));
        if rank == 0 || rank > MAX_RANK {
            return Err(Failure::new(format!("`{module}` of the adapter has rank {rank}"))
                .detail(format!("ranks of 1 to {MAX_RANK} are read")));
        }
        let divisor = match self.use_rslora {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        let scale = (alpha / divisor) as f32;
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Failure::new(format!(
                "`{module}` of the adapter is scaled by {scale}, which is not a positive number"
            ))
            .detail(format!("`lora_alpha` is {alpha}, the rank is {rank}")));
        }
        Ok((rank, scale))
    }

    /// Checks that `target_modules` names a module with factors.
    ///
    /// # Errors
    /// Fails for a module that peft would pass over.
    pub(super) fn check_target(&self, module: &str) -> Result<(), Failure> {
        let Some(targets) = &self.targets else {
            return Ok(());
        };
        // As peft's `check_target_module_exists`: a name is the whole path, or its end.
        let is_named = |module: &str| {
            targets.iter().any(|name| {
                let before = module.strip_suffix(name.as_str());
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            })
        };
        if is_named(module) || is_named(&inside(module)) {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the adapter has factors of `{module}`, which its `target_modules` do not name"
        ))
        .detail(format!("`target_modules` are {}", targets.join(", ")))
        .detail("peft passes over such factors, so the merged model would not be the trained one")
        .hint(format!(
            "add \"{}\" to `target_modules` in {CONFIG_FILE} if it was trained, or remove its factors",
            module.rsplit('.').next().unwrap_or(module)
        )))
    }

    /// The rows of `module` that the adapter replaces.
    pub(super) fn token_rows(&self, module: &str) -> Option<&[usize]> {
        match self.tokens.as_ref()? {
            Tokens::OfEmbedding(rows) => Some(rows),
            Tokens::ByModule(modules) => {
                let is_named = |name: &str| {
                    let before = module.strip_suffix(name);
                    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
                };
                let mut found = modules.iter().filter(|(name, _)| is_named(name));
                found.next().map(|(_, rows)| rows.as_slice())
            }
        }
    }
}

/// The names in a list.
fn names(value: &Value) -> Option<Vec<String>> {
    let names = value.as_array()?.iter();
    names.map(|name| name.as_str().map(str::to_owned)).collect()
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(flag) => *flag,
        Value::Array(items) => !items.is_empty(),
        Value::Object(_) | Value::String(_) | Value::Number(_) => true,
    }
}

/// The refusal of an initialisation that moved a part of the base's weights into the factors. When peft converts such an adapter
/// (`path_initial_model_for_weight_conversion`), it doubles r and writes `init_lora_weights: true`, so a converted adapter is read.
fn changed_base(
    init: Option<&Value>,
    refused: &dyn Fn(String, &str) -> Failure,
) -> Option<Failure> {
    let kind = match init {
        None | Some(Value::Null | Value::Bool(_)) => return None,
        Some(Value::String(kind)) => kind.to_lowercase(),
        Some(other) => other.to_string(),
    };
    let what = format!("its `init_lora_weights` is `{kind}`");
    let why = "this initialisation changed the base: the adapter fits only that changed base";
    match kind.as_str() {
        // MiCA and EVA choose the first factors by the base or by data and leave the base as it is.
        "gaussian" | "orthogonal" | "eva" | "mica" => None,
        "loftq" => Some(refused(what, why)),
        "olora" | "lora_ga" => Some(refused(what, why).hint(CONVERT)),
        _ if kind.starts_with("pissa") || kind.starts_with("corda") => {
            Some(refused(what, why).hint(CONVERT))
        }
        _ => Some(refused(what, "this initialisation is not known, it may have changed the base")),
    }
}

const CONVERT: &str = "convert it with peft, which needs the adapter as it was before training: \
     model.save_pretrained('converted', path_initial_model_for_weight_conversion='INITIAL')";

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> Result<AdapterConfig> {
        let raw = serde_json::from_str(json)?;
        AdapterConfig::check(raw, Path::new("a"))
    }

    fn message(json: &str) -> String {
        config(json).unwrap_err().to_string()
    }

    #[test]
    fn patterns_match_the_end_of_a_path_and_the_first_counts() {
        let config = config(
            r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8,
                "rank_pattern": {"layers\\.[34]\\.mlp\\.down_proj": 6, "q_proj": 2, "z": 9, "down_proj": 5},
                "alpha_pattern": {"mlp.gate_proj": 12, "_proj": 99}}"#,
        )
        .unwrap();
        for (module, rank, scale) in [
            ("model.layers.3.mlp.down_proj", 6, 8.0 / 6.0),
            ("model.layers.2.mlp.down_proj", 5, 8.0 / 5.0),
            ("model.layers.0.self_attn.q_proj", 2, 4.0),
            ("model.layers.0.mlp.gate_proj", 4, 3.0),
            // `_proj` is not the whole last name, so it does not match.
            ("model.layers.0.self_attn.v_proj", 4, 2.0),
            ("q_proj", 2, 4.0),
        ] {
            let found = config.rank_and_scale(module).unwrap();
            assert_eq!(found, (rank, scale as f32), "{module}");
        }
    }

    #[test]
    fn factors_of_a_module_that_is_no_target_are_refused_by_name() {
        let targets = |value: &str| {
            config(&format!(r#"{{"peft_type": "LORA", "target_modules": {value}}}"#)).unwrap()
        };
        let module = "model.layers.0.self_attn.q_proj";
        for value in [
            r#"["v_proj", "q_proj"]"#,
            r#"["self_attn.q_proj"]"#,
            r#"["model.layers.0.self_attn.q_proj"]"#,
            r#""all-linear""#,
            r#"".*_proj""#,
            "null",
        ] {
            assert_eq!(targets(value).check_target(module), Ok(()), "{value}");
        }
        for value in [r#"["v_proj"]"#, r#"["proj"]"#, "[]"] {
            let refused = targets(value).check_target(module).unwrap_err();
            assert!(refused.message.contains(module), "{refused}");
            assert!(refused.hint.unwrap().contains("\"q_proj\""));
        }
    }

    #[test]
    fn rslora_divides_by_the_root() {
        let config =
            config(r#"{"peft_type": "LORA", "r": 9, "lora_alpha": 6, "use_rslora": true}"#);
        assert_eq!(config.unwrap().rank_and_scale("x").unwrap(), (9, 2.0));
    }

    #[test]
    fn defaults_are_those_of_peft() {
        let config = config(r#"{"peft_type": "LORA"}"#).unwrap();
        assert_eq!(config.rank_and_scale("x").unwrap(), (8, 1.0));
        assert!(!config.use_dora && config.base_model.is_none());
    }

    #[test]
    fn ranks_and_scales_are_positive_numbers() {
        for settings in [
            r#""r": 0"#,
            r#""r": 1000000000000"#,
            r#""lora_alpha": 0"#,
            r#""lora_alpha": -16"#,
            r#""lora_alpha": 1e300"#,
            r#""lora_alpha": 1e-300"#,
            r#""rank_pattern": {"q_proj": 0}"#,
            r#""alpha_pattern": {"q_proj": -1}"#,
        ] {
            let config = config(&format!(r#"{{"peft_type": "LORA", {settings}}}"#)).unwrap();
            let error = config.rank_and_scale("m.q_proj").unwrap_err().to_string();
            assert!(error.contains("`m.q_proj`"), "{settings}: {error}");
        }
        for settings in [r#""r": -1"#, r#""r": 1.5"#, r#""lora_alpha": NaN"#] {
            config(&format!(r#"{{"peft_type": "LORA", {settings}}}"#)).unwrap_err();
        }
    }

    #[test]
    fn adapters_that_are_no_change_of_weights_are_refused_by_name() {
        for (name, value) in [
            ("layer_replication", "[[0, 2]]"),
            ("target_parameters", r#"["experts.gate"]"#),
            ("kasa_config", r#"{"beta": 1}"#),
            ("alora_invocation_tokens", "[1]"),
        ] {
            let found = message(&format!(r#"{{"peft_type": "LORA", "{name}": {value}}}"#));
            assert!(found.contains(name), "{found}");
        }
        for kind in [r#""IA3""#, r#""ADALORA""#, "null"] {
            let found = message(&format!(r#"{{"peft_type": {kind}}}"#));
            assert!(found.contains("`peft_type`"), "{found}");
        }
    }

    #[test]
    fn initialisations_that_changed_the_base_are_refused() {
        let with = |kind: &str| {
            config(&format!(r#"{{"peft_type": "LORA", "init_lora_weights": {kind}}}"#))
        };
        for kind in ["true", "false", "null", r#""gaussian""#, r#""eva""#, r#""mica""#] {
            with(kind).unwrap();
        }
        for kind in ["pissa", "pissa_niter_4", "OLoRA", "corda", "lora_ga", "loftq", "new"] {
            let found = with(&format!("\"{kind}\"")).unwrap_err().to_string();
            assert!(found.contains(&kind.to_lowercase()), "{found}");
            assert!(found.contains("changed"), "{found}");
        }
    }

    #[test]
    fn a_pattern_that_cannot_be_matched_is_named() {
        for key in ["(", "(?=q)", r"(a)\\1"] {
            let json = format!(r#"{{"peft_type": "LORA", "rank_pattern": {{"{key}": 1}}}}"#);
            let found = message(&json);
            assert!(found.contains("`rank_pattern`"), "{found}");
        }
    }

    #[test]
    fn token_rows_belong_to_the_module_that_is_named() {
        let of = |tokens: &str| {
            config(&format!(r#"{{"peft_type": "LORA", "trainable_token_indices": {tokens}}}"#))
                .unwrap()
        };
        let module = "model.embed_tokens";
        assert_eq!(of("[3, 1]").token_rows(module), Some(&[3, 1][..]));
        let by_name = of(r#"{"tokens": [1], "embed_tokens": [7]}"#);
        assert_eq!(by_name.token_rows(module), Some(&[7][..]));
        assert_eq!(by_name.token_rows("lm_head"), None);
        assert_eq!(of("null").token_rows(module), None);
    }
}
