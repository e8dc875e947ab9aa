//! Pictures of runs as SVG text: a file per picture.
//!
//! | file | picture |
//! | --- | --- |
//! | `heat` | layer × matrix: sparsity, relative output error |
//! | `phases` | bars: time per phase |
//! | `memory` | memory over time, or the peak per phase where no samples were taken |
//! | `training` | losses and learning rate of a training |
//! | `metrics` | perplexity, divergence or accuracy against sparsity, a line per method |
//! | `costs` | the same against bytes and against speed, a name per run |
//! | `sheet`, `scale`, `chart` | shared parts: colours, shapes and texts; ticks; points, lines and bars |
//!
//! No text is placed by its width, which depends on the reader's fonts. Titles and units have rows of their own above the picture,
//! and numbers stand next to the ends of lines and bars.

mod chart;
pub mod costs;
pub mod heat;
pub mod memory;
pub mod metrics;
pub mod phases;
mod scale;
mod sheet;
pub mod training;

/// A picture and its caption.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Figure {
    /// The file's name without ending: `sparsity`.
    pub name: String,
    /// A caption that explains the picture.
    pub caption: String,
    /// A whole SVG document.
    pub svg: String,
}
