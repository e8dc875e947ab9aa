//! `--target-params` and `--target-size`: `auto` of `--drop-layers` or `--drop-width` becomes the smallest number that meets them.
//!
//! Sizes are counted from the tensors of the checkpoint before anything is computed. Where layers differ in size, the smallest are counted,
//! so the target holds whichever layers the rule chooses.

use anyhow::Result;

use super::folder::RunFolder;
use super::model_report::parameters;
use super::opened::OpenedModel;
use super::width_drop::width;
use crate::bytes::ByteSize;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::model::ModelConfig;
use crate::pipeline::width_drop::multiple_of;
use crate::run::Events;
use crate::settings::{
    DropCount, Settings, TargetSizeSettings, WidthDropSettings, WidthOf, WidthShare,
};

/// A size that the model has to meet, in parameters or bytes.
struct TargetSize<'a> {
    model: &'a OpenedModel,
    most: u64,
    in_bytes: bool,
}

impl<'a> TargetSize<'a> {
    fn of(asked: &TargetSizeSettings, model: &'a OpenedModel) -> Self {
        let (most, in_bytes) = match (asked.target_params, asked.target_size) {
            (Some(count), _) => (count.0, false),
            (None, size) => (size.unwrap_or_default().0, true),
        };
        Self { model, most, in_bytes }
    }

    fn size_of(&self, tensor: &TensorEntry) -> u64 {
        match self.in_bytes {
            true => tensor.bytes,
            false => tensor.elements() as u64,
        }
    }

    /// The size of the whole model.
    fn whole(&self) -> u64 {
        match self.in_bytes {
            true => self.model.checkpoint.total_bytes().0,
            false => parameters(&self.model.checkpoint),
        }
    }

    /// The sizes of the layers, smallest first.
    fn layers(&self) -> Result<Vec<u64>> {
        let (config, checkpoint) = (&self.model.config, &self.model.checkpoint);
        let of_layer = |layer| -> Result<u64> {
            let tensors = config.layer_tensors(layer);
            tensors
                .map(|tensor| Ok(self.size_of(checkpoint.require(&tensor.name, &tensor.shape)?)))
                .sum()
        };
        let sizes: Result<Vec<u64>> = (0..config.num_hidden_layers).map(of_layer).collect();
        let mut sizes = sizes?;
        sizes.sort_unstable();
        Ok(sizes)
    }

    /// The size that a narrower layer loses.
    fn lost_by(&self, narrower: &ModelConfig) -> Result<u64> {
        let pairs = self.model.config.layer_tensors(0).zip(narrower.layer_tensors(0));
        let lost = pairs.map(|(before, after)| -> Result<u64> {
            let entry = self.model.checkpoint.require(&before.name, &before.shape)?;
            let elements = entry.elements().max(1) as u64;
            let left = after.shape.iter().product::<usize>() as u64;
            Ok(self.size_of(entry) / elements * (elements - left))
        });
        lost.sum()
    }

    fn in_words(&self, size: u64) -> String {
        match self.in_bytes {
            true => ByteSize(size).to_string(),
            false => format!("{size} parameters"),
        }
    }

    /// The size with a single layer.
    fn one_layer(&self) -> Result<u64> {
        let mut sizes = self.layers()?;
        sizes.pop();
        Ok(self.whole() - sizes.iter().sum::<u64>())
    }

    /// The flag of a target of so many bytes or parameters, rounded up.
    fn flag_of(&self, size: u64) -> String {
        match self.in_bytes {
            true => format!("--target-size {}KiB", size.div_ceil(1 << 10)),
            false => format!("--target-params {size}"),
        }
    }

    /// The refusal of a target that nothing meets.
    fn missed(&self, flag: &str, least: u64) -> Failure {
        Failure::usage(format!(
            "{flag} cannot make this model as small as {}",
            self.in_words(self.most)
        ))
        .detail(format!(
            "the model has {}, and at least {} stay",
            self.in_words(self.whole()),
            self.in_words(least)
        ))
    }
}

/// Replaces `auto` by the number of layers, or the share of the width, that meets the target size of the settings.
///
/// # Errors
/// Fails with exit code 2 for a target without `auto`, for a model that is small enough, and for a target out of reach.
pub(super) fn resolve(
    settings: &mut Settings,
    model: &OpenedModel,
    folder: &RunFolder,
    events: &dyn Events,
) -> Result<()> {
    let width_is_auto =
        settings.width_drop.as_ref().is_some_and(|drop| drop.drop_width == WidthShare::Auto);
    let Some(asked) = settings.target_size.take() else {
        if width_is_auto {
            return Err(Failure::usage("--drop-width auto needs a size to meet")
                .hint("add --target-params 800M or --target-size 2GiB, or name the share: --drop-width 0.2")
                .into());
        }
        return Ok(());
    };
    let target = TargetSize::of(&asked, model);
    let whole = target.whole();
    if whole <= target.most {
        let (has, asked) = (target.in_words(whole), target.in_words(target.most));
        return Err(Failure::usage(format!("the model has {has}, which is not more than {asked}"))
            .hint("choose a smaller target")
            .into());
    }
    let layers_are_auto =
        settings.layer_drop.as_ref().is_some_and(|drop| drop.drop_layers == Some(DropCount::Auto));
    match (layers_are_auto, &mut settings.layer_drop, &mut settings.width_drop) {
        (true, Some(drop), None) => {
            let (number, left) = layers(&target)?;
            drop.drop_layers = Some(DropCount::Number(number));
            events.note(format!(
                "target       --drop-layers {number}: {} stay",
                target.in_words(left)
            ));
            Ok(())
        }
        (false, None, Some(drop)) if width_is_auto => {
            let (share, left) = share(&target, drop, folder)?;
            drop.drop_width = WidthShare::Share(share);
            events
                .note(format!("target       --drop-width {share}: {} stay", target.in_words(left)));
            Ok(())
        }
        _ => Err(Failure::usage(
            "a target size decides one of layers and width, and which is not named",
        )
        .hint("add either --drop-layers auto or --drop-width auto, and no other flag of the two")
        .into()),
    }
}

/// The fewest layers that have to go, and the size without them.
fn layers(target: &TargetSize<'_>) -> Result<(usize, u64)> {
    let mut sizes = target.layers()?;
    // A layer stays.
    sizes.pop();
    let mut left = target.whole();
    for (number, size) in (1..).zip(sizes) {
        left -= size;
        if left <= target.most {
            return Ok((number, left));
        }
    }
    Err(target
        .missed("--drop-layers", left)
        .hint(format!(
            "choose a larger target, like {}, or a smaller source: embedding and head stay",
            target.flag_of(left)
        ))
        .into())
}

/// The smallest share of the width that has to go, and the size without it.
fn share(
    target: &TargetSize<'_>,
    drop: &WidthDropSettings,
    folder: &RunFolder,
) -> Result<(f64, u64)> {
    let config = &target.model.config;
    let units = match drop.width_of {
        WidthOf::Heads => config.num_key_value_heads,
        WidthOf::Mlp | WidthOf::Both => {
            config.intermediate_size / multiple_of(config.intermediate_size)
        }
    };
    let mut left = target.whole();
    for kept in (1..units).rev() {
        let share = 1.0 - kept as f64 / units as f64;
        let of_share = |share: f64| {
            let drop_width = WidthShare::Share(share);
            width(&WidthDropSettings { drop_width, ..drop.clone() }, config, folder)
        };
        // Some numbers of heads load nowhere.
        let Ok(width) = of_share(share) else {
            continue;
        };
        let lost = target.lost_by(&width.config(config))? * config.num_hidden_layers as u64;
        left = target.whole() - lost;
        if left <= target.most {
            // The fewest digits that give the same width: a person reads the share, and types it again.
            let shorter = (2..=6).map(|digits| {
                let units = f64::from(10u32.pow(digits));
                (share * units).round() / units
            });
            let mut same = shorter.filter(|&of| of_share(of).is_ok_and(|other| other == width));
            return Ok((same.next().unwrap_or(share), left));
        }
    }
    let mut fixes = vec![match layers(target) {
        Ok(_) => "use --drop-layers auto".to_string(),
        Err(_) => format!("use --drop-layers auto {}", target.flag_of(target.one_layer()?)),
    }];
    // Some models have no narrower form.
    if left < target.whole() {
        fixes.push(format!("choose a larger target, like {}", target.flag_of(left)));
    }
    Err(target
        .missed(&format!("--drop-width with --width-of {}", drop.width_of.name()), left)
        .hint(fixes.join(", or "))
        .into())
}
