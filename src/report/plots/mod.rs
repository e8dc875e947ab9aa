//! Pictures of runs as SVG text, drawn with plotters: one file per picture.
//!
//! | file | picture |
//! | --- | --- |
//! | `heat` | layer × matrix: sparsity, relative output error |
//! | `phases` | bars: where the time went |
//! | `memory` | memory over time, or the peak per phase where no samples were taken |
//! | `perplexity` | perplexity against sparsity, one line per method |
//! | `canvas`, `scale`, `bars`, `chart` | what they share: colours and texts, ticks, horizontal bars, lines over axes |
//!
//! plotters' SVG backend only guesses how wide a text is. So texts stand where no guess is needed: titles and units in rows of
//! their own above the picture, numbers beside ends of lines and bars, never centred between things that could touch.

mod bars;
mod canvas;
mod chart;
pub mod heat;
pub mod memory;
pub mod perplexity;
pub mod phases;
mod scale;

/// A picture and what it says in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure {
    /// The file's name without ending: `sparsity`.
    pub name: String,
    /// A caption: what is shown and how to read it.
    pub caption: String,
    /// A whole SVG document.
    pub svg: String,
}
