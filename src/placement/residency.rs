//! The layers of a generating model that stay in memory, and the layers that are read again for every token.
//!
//! A sweep uses each layer once. A model that generates text uses every layer for every token, so the layers that fit stay in memory. A
//! layer that does not fit is streamed: it is read from disk at each use, and ahead of its use if two layers fit. Streamed layers are
//! spread evenly over the depth, so that reading overlaps the computing of the layers between them. Numbers in, numbers out.

use crate::bytes::ByteSize;
use crate::failure::Failure;

/// Sizes of the parts that need memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Decoder layers.
    pub layers: usize,
    /// A layer in its stored dtype.
    pub layer: ByteSize,
    /// The head. It stays in memory, since every token needs all of it.
    pub head: ByteSize,
    /// Keys and values of the longest sequence.
    pub kv_cache: ByteSize,
    /// Scratch, activations, logits.
    pub workspace: ByteSize,
    /// Memory in use before layers are loaded: tokenizer, headers, code.
    pub held: ByteSize,
}

impl Sizes {
    fn other_bytes(&self) -> ByteSize {
        [self.head, self.kv_cache, self.workspace, self.held].into_iter().sum()
    }

    fn with(&self, layers: usize) -> ByteSize {
        self.other_bytes() + ByteSize(self.layer.0.saturating_mul(layers as u64))
    }
}

/// The division into resident and streamed layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    layers: usize,
    streamed: usize,
    reads_ahead: bool,
    predicted: ByteSize,
}

impl Residency {
    /// All layers stay in memory, without a budget.
    pub fn all(layers: usize) -> Self {
        Self { layers, streamed: 0, reads_ahead: false, predicted: ByteSize::ZERO }
    }

    /// No layer stays in memory longer than its use.
    pub fn none(layers: usize) -> Self {
        Self { layers, streamed: layers, reads_ahead: layers > 1, predicted: ByteSize::ZERO }
    }

    /// Keeps as many layers in memory as fit `budget`.
    ///
    /// # Errors
    /// Fails when a single layer does not fit, with the missing bytes and flags that fit.
    pub fn settle(sizes: &Sizes, budget: ByteSize) -> Result<Self, Failure> {
        let room = budget.0.saturating_sub(sizes.other_bytes().0);
        let slots = room
            .checked_div(sizes.layer.0)
            .map_or(usize::MAX, |slots| usize::try_from(slots).unwrap_or(usize::MAX));
        if sizes.with(1) > budget {
            return Err(shortage(sizes, budget));
        }
        let settled = |streamed: usize, reads_ahead: bool, in_memory: usize| Self {
            layers: sizes.layers,
            streamed,
            reads_ahead,
            predicted: sizes.with(in_memory),
        };
        Ok(match slots {
            // With a single slot there is no memory to read ahead.
            1 if sizes.layers > 1 => settled(sizes.layers, false, 1),
            slots if slots >= sizes.layers => settled(0, false, sizes.layers),
            // Two of the slots are for the layer in use and the layer being read.
            slots => settled(sizes.layers - (slots - 2), true, slots),
        })
    }

    /// Decoder layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// The number of layers that stay in memory.
    pub fn resident(&self) -> usize {
        self.layers - self.streamed
    }

    /// The number of layers that are read at each use.
    pub fn streamed(&self) -> usize {
        self.streamed
    }

    /// Returns whether the next streamed layer is read while the layers before it compute.
    pub fn reads_ahead(&self) -> bool {
        self.reads_ahead
    }

    /// The predicted peak of the process; zero without a prediction.
    pub fn predicted(&self) -> ByteSize {
        self.predicted
    }

    /// Returns whether this layer is read at each use.
    pub fn is_streamed(&self, layer: usize) -> bool {
        // A layer is streamed where layer · streamed / layers reaches the next whole number: this spreads them evenly.
        let share = |layer: usize| layer * self.streamed / self.layers.max(1);
        share(layer + 1) > share(layer)
    }
}

fn shortage(sizes: &Sizes, budget: ByteSize) -> Failure {
    const MIB: u64 = 1 << 20;
    let needed = sizes.with(1);
    let short = ByteSize(needed.0.saturating_sub(budget.0));
    let enough = needed.0.div_ceil(MIB);
    let hint = if short < sizes.kv_cache {
        format!("use --max-memory cpu={enough}MiB, a smaller --max-tokens or a shorter prompt")
    } else {
        format!("use --max-memory cpu={enough}MiB")
    };
    Failure::new(format!(
        "the model does not fit into {budget}: {short} are missing"
    ))
    .detail(format!(
        "with one layer at a time in memory, generation needs {needed}: layer {}, head {}, keys and values {}, workspace {}, in use already {}",
        sizes.layer, sizes.head, sizes.kv_cache, sizes.workspace, sizes.held
    ))
    .hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 10 layers of 100 bytes, and 50 bytes for the rest.
    fn sizes() -> Sizes {
        Sizes {
            layers: 10,
            layer: ByteSize(100),
            head: ByteSize(20),
            kv_cache: ByteSize(15),
            workspace: ByteSize(10),
            held: ByteSize(5),
        }
    }

    fn settled(budget: u64) -> (usize, usize, bool, u64) {
        let found = Residency::settle(&sizes(), ByteSize(budget)).unwrap();
        (found.resident(), found.streamed(), found.reads_ahead(), found.predicted().0)
    }

    #[test]
    fn what_fits_stays_and_two_places_are_for_what_streams() {
        assert_eq!(settled(1050), (10, 0, false, 1050));
        assert_eq!(settled(u64::MAX), (10, 0, false, 1050));
        // Nine places: seven layers stay, one is used, one is read.
        assert_eq!(settled(1049), (7, 3, true, 950));
        assert_eq!(settled(350), (1, 9, true, 350));
        assert_eq!(settled(250), (0, 10, true, 250));
        assert_eq!(settled(249), (0, 10, false, 150));
        assert_eq!(settled(150), (0, 10, false, 150));
    }

    #[test]
    fn too_little_is_refused_with_what_is_missing_and_what_would_do() {
        let failure = Residency::settle(&sizes(), ByteSize(149)).unwrap_err();
        assert_eq!(failure.message, "the model does not fit into 149 B: 1 B are missing");
        assert_eq!(
            failure.hint.unwrap(),
            "use --max-memory cpu=1MiB, a smaller --max-tokens or a shorter prompt"
        );
        let failure = Residency::settle(&sizes(), ByteSize(10)).unwrap_err();
        assert_eq!(failure.hint.unwrap(), "use --max-memory cpu=1MiB");
    }

    #[test]
    fn streamed_layers_are_spread() {
        let found = Residency::settle(&sizes(), ByteSize(1049)).unwrap();
        let streamed: Vec<usize> = (0..10).filter(|&layer| found.is_streamed(layer)).collect();
        assert_eq!(streamed, [3, 6, 9]);
        assert!((0..10).all(|layer| Residency::none(10).is_streamed(layer)));
        assert!((0..10).all(|layer| !Residency::all(10).is_streamed(layer)));
    }

    #[test]
    fn a_model_of_one_layer_is_in_memory_or_refused() {
        let one = Sizes { layers: 1, ..sizes() };
        let found = Residency::settle(&one, ByteSize(150)).unwrap();
        assert_eq!((found.resident(), found.streamed()), (1, 0));
        assert!(Residency::settle(&one, ByteSize(149)).is_err());
    }

    proptest! {
        #[test]
        fn no_plan_exceeds_its_budget_and_more_memory_never_streams_more(
            layers in 1usize..90, layer in 1u64..1000, other in 0u64..5000, budget in 0u64..100_000, more in 0u64..50_000
        ) {
            let sizes = Sizes { layers, layer: ByteSize(layer), head: ByteSize(other), kv_cache: ByteSize(0),
                workspace: ByteSize(0), held: ByteSize(0) };
            let found = Residency::settle(&sizes, ByteSize(budget));
            prop_assert_eq!(found.is_err(), budget < other + layer);
            if let Ok(found) = found {
                prop_assert!(found.predicted().0 <= budget);
                let count = (0..layers).filter(|&layer| found.is_streamed(layer)).count();
                prop_assert_eq!(count, found.streamed());
                let richer = Residency::settle(&sizes, ByteSize(budget + more)).unwrap();
                prop_assert!(richer.streamed() <= found.streamed());
            }
        }
    }
}
