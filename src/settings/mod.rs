//! Settings of a run: everything a command line can ask for. Each flag is described once, at its field: name, help, default and parser.
//!
//! A serialised [`Settings`] is the `settings` of `run.json`. The settings that decide the result ([`Settings::deciding`]) are the
//! metadata of the mask file, and a resumed run is compared by them. A setting that is added here takes part in all three.
//!
//! | file | content |
//! | --- | --- |
//! | `run` | the settings of `prune`, `prune eval` and `prune recover`, made of groups |
//! | `model`, `sparsity`, `calibration`, `evaluation`, `tasks`, `device`, `output` | groups that commands share |
//! | `layer_drop`, `width_drop`, `target_size`, `recovery`, `closing` | groups of smaller models and of trainings |
//! | `merge`, `quantize`, `pack`, `generate`, `grid`, `plan` | settings of the other commands |
//! | `conversion` | what `prune quantize`, `pack` and `unpack` share |
//! | `defaults`, `values` | shared defaults; parsers of flag values |
//! | `deciding` | the mark of settings that do not decide the result |

mod calibration;
mod closing;
mod conversion;
mod deciding;
mod defaults;
mod device;
mod evaluation;
mod generate;
mod grid;
mod layer_drop;
mod merge;
mod model;
mod output;
mod pack;
mod plan;
mod quantize;
mod recovery;
mod run;
mod sparsity;
mod target_size;
mod tasks;
mod values;
mod width_drop;

pub use calibration::CalibrationSettings;
pub use closing::{CloseTarget, ClosingSettings};
pub use conversion::ConversionSettings;
pub use defaults::{DATASET, NSAMPLES, PRUNE_METHOD, SEQLEN};
pub use device::{DeviceChoice, DeviceMapChoice, DeviceSettings, HiddenStatesChoice, check_device};
pub use evaluation::{EvalSides, EvaluationSettings};
pub use generate::{DecodingSettings, GenerateSettings, WeightChoice, WeightSettings};
pub use grid::{GridSettings, GridShard, ShardOrder};
pub use layer_drop::{DropCount, LayerDropSettings};
pub use merge::{MergeEval, MergeSettings, PIECE_ELEMENTS, SaliencySource};
pub use model::{ComputeDtype, ModelSettings};
pub use output::OutputSettings;
pub use pack::PackSettings;
pub use plan::{PlanSettings, PlanSubject, RankSettings};
pub use quantize::QuantizeSettings;
pub use recovery::{ALL_LINEAR, DISTILL_WEIGHT, RecoverySettings, RecoveryWay, TEXT, TrainedKind};
pub use run::Settings;
pub use sparsity::SparsitySettings;
pub use target_size::{ParameterCount, TargetSizeSettings};
pub use tasks::TaskSettings;
pub use values::share;
pub use width_drop::{WidthDropSettings, WidthOf, WidthShare};
