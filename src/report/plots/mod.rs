//! Pictures of runs as SVG text, drawn with plotters: a file per picture.
//!
//! | file | picture |
//! | --- | --- |
//! | `heat` | layer × matrix: sparsity, relative output error |
//! | `phases` | bars: time per phase |
//! | `memory` | memory over time, or the peak per phase where no samples were taken |
//! | `training` | losses and learning rate of a training |
//! | `perplexity` | perplexity against sparsity, a line per method |
//! | `canvas`, `scale`, `bars`, `chart` | shared parts: colours and texts, ticks, horizontal bars, lines over axes |
//!
//! plotters' SVG backend only guesses the width of a text. So no text is placed by its width: titles and units have rows of their own
//! above the picture, and numbers stand next to the ends of lines and bars.

mod bars;
mod canvas;
mod chart;
pub mod heat;
pub mod memory;
pub mod perplexity;
pub mod phases;
mod scale;
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
