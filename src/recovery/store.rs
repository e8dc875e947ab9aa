//! Values, gradients and optimizer states of the trained parameters of all layers, in memory or in a file.
//!
//! A parameter in a file is in memory only while it is used: its values in a pass of its layer, all of it in its update. The file has a
//! record per layer. In a record every parameter has its values, its gradient, its optimizer state and its mask.
//!
//! A store can keep the best values beside the current values. It writes both to a stream, from which a later process continues. Masks
//! that close are part of the stream.

use std::borrow::Cow;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::parameters::{LayerParameters, ParameterSpec};
use crate::disk::positioned;
use crate::recovery::optimizers::{KeptMask, Optimizer};
use crate::runtime::spill_file;

/// A parameter while it is changed.
#[derive(Debug)]
pub struct ChangedParameter<'a> {
    /// Its place among the parameters of a layer.
    pub place: usize,
    /// Its values.
    pub values: &'a mut [f32],
    /// Its gradient.
    pub gradient: &'a mut [f32],
    /// Its mask, from which bits may be removed.
    pub kept: Option<&'a mut KeptMask>,
    /// Its state of the optimizer.
    pub state: &'a mut [u8],
}

/// A change of a parameter.
pub type ParameterChange<'c> = dyn FnMut(ChangedParameter<'_>) + 'c;

/// The place of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StorePlace {
    /// Memory.
    Memory,
    /// A file in this folder, which has no name and goes with the process.
    File(PathBuf),
}

/// A parameter of a layer with everything that belongs to it.
#[derive(Debug, Clone, Default)]
struct StoredParameter {
    values: Vec<f32>,
    gradient: Vec<f32>,
    state: Vec<u8>,
    kept: Option<KeptMask>,
    best: Vec<f32>,
}

/// A kind of data of a parameter in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DataKind {
    Values,
    Gradient,
    State,
    Kept,
    Best,
}

impl DataKind {
    const ALL: [Self; 5] = [Self::Values, Self::Gradient, Self::State, Self::Kept, Self::Best];
}

#[derive(Debug)]
enum StoreSlots {
    /// By layer and parameter.
    Memory(Vec<Vec<StoredParameter>>),
    File(File),
}

/// The parameters of all layers; see the module's first lines.
#[derive(Debug)]
pub struct ParameterStore {
    specs: Vec<ParameterSpec>,
    state_bytes: Vec<usize>,
    layers: usize,
    store: StoreSlots,
    has_best: bool,
    /// Masks change during the training.
    closes: bool,
}

/// Bits of the first byte of a stream.
const HAS_BEST: u8 = 1;
const HAS_MASKS: u8 = 2;

impl ParameterStore {
    /// An empty store. Every layer is put before it is used.
    ///
    /// # Errors
    /// Fails when the file cannot be created.
    pub fn new(
        specs: Vec<ParameterSpec>,
        optimizer: &dyn Optimizer,
        layers: usize,
        place: &StorePlace,
    ) -> Result<Self> {
        let state_bytes = specs.iter().map(|spec| optimizer.state_bytes(spec.elements())).collect();
        let store = match place {
            StorePlace::Memory => {
                StoreSlots::Memory(vec![vec![StoredParameter::default(); specs.len()]; layers])
            }
            StorePlace::File(folder) => StoreSlots::File(spill_file(folder)?),
        };
        Ok(Self { specs, state_bytes, layers, store, has_best: false, closes: false })
    }

    /// The same store, whose masks `close` during the training.
    #[must_use]
    pub fn closing(self, closes: bool) -> Self {
        Self { closes, ..self }
    }

    /// The bytes of a store of these parameters: in memory, or in the file.
    pub fn bytes(
        specs: &[ParameterSpec],
        optimizer: &dyn Optimizer,
        layers: usize,
        has_best: bool,
    ) -> u64 {
        let each = specs.iter().map(|spec| {
            let elements = spec.elements();
            let mask = if spec.has_mask() { elements.div_ceil(8) } else { 0 };
            let values = if has_best { 3 } else { 2 };
            values * 4 * elements + optimizer.state_bytes(elements) + mask
        });
        layers as u64 * each.map(|bytes| bytes as u64).sum::<u64>()
    }

    /// The parameters of every layer.
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// The number of trained parameters in all layers.
    pub fn elements(&self) -> u64 {
        let each: usize = self.specs.iter().map(ParameterSpec::elements).sum();
        self.layers as u64 * each as u64
    }

    /// Puts the parameters of a layer before the first step: fresh optimizer states, no gradients.
    ///
    /// # Errors
    /// Fails when the file cannot be written.
    pub fn put(&mut self, layer: usize, parameters: LayerParameters) -> Result<()> {
        let LayerParameters { values, kept } = parameters;
        for (at, (values, kept)) in values.into_iter().zip(kept).enumerate() {
            let state = vec![0; self.state_bytes[at]];
            match &mut self.store {
                StoreSlots::Memory(slots) => {
                    slots[layer][at] =
                        StoredParameter { values, state, kept, ..StoredParameter::default() };
                }
                StoreSlots::File(_) => {
                    self.write(layer, at, DataKind::Values, bytemuck::cast_slice(&values))?;
                    self.write(layer, at, DataKind::State, &state)?;
                    if let Some(kept) = kept {
                        self.write(layer, at, DataKind::Kept, kept.bits())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The values of a layer's parameters, in their order.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn values(&self, layer: usize) -> Result<Vec<Cow<'_, [f32]>>> {
        self.floats(layer, DataKind::Values)
    }

    /// The best values of a layer's parameters; the current values where no best values were kept.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn best_values(&self, layer: usize) -> Result<Vec<Cow<'_, [f32]>>> {
        match self.has_best {
            true => self.floats(layer, DataKind::Best),
            false => self.values(layer),
        }
    }

    fn floats(&self, layer: usize, kind: DataKind) -> Result<Vec<Cow<'_, [f32]>>> {
        let of = |at: usize| -> Result<Cow<'_, [f32]>> {
            Ok(match &self.store {
                StoreSlots::Memory(slots) => Cow::Borrowed(match kind {
                    DataKind::Best => &slots[layer][at].best,
                    _ => &slots[layer][at].values,
                }),
                StoreSlots::File(_) => Cow::Owned(self.read_floats(layer, at, kind)?),
            })
        };
        (0..self.specs.len()).map(of).collect()
    }

    /// The masks of a layer's parameters, in their order.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn kept(&self, layer: usize) -> Result<Vec<Option<KeptMask>>> {
        (0..self.specs.len()).map(|at| self.mask(layer, at)).collect()
    }

    fn mask(&self, layer: usize, at: usize) -> Result<Option<KeptMask>> {
        match &self.store {
            StoreSlots::Memory(slots) => Ok(slots[layer][at].kept.clone()),
            StoreSlots::File(_) if !self.specs[at].has_mask() => Ok(None),
            StoreSlots::File(_) => {
                let elements = self.specs[at].elements();
                let mut bits = vec![0; elements.div_ceil(8)];
                self.read(layer, at, DataKind::Kept, &mut bits)?;
                Ok(KeptMask::from_bits(bits, elements))
            }
        }
    }

    /// Puts the gradients of a layer's parameters for this step.
    ///
    /// # Errors
    /// Fails when the file cannot be written.
    pub fn put_gradients(&mut self, layer: usize, gradients: Vec<Vec<f32>>) -> Result<()> {
        for (at, gradient) in gradients.into_iter().enumerate() {
            match &mut self.store {
                StoreSlots::Memory(slots) => slots[layer][at].gradient = gradient,
                StoreSlots::File(_) => {
                    self.write(layer, at, DataKind::Gradient, bytemuck::cast_slice(&gradient))?;
                }
            }
        }
        Ok(())
    }

    /// Calls `change` with every parameter of a layer. The gradients are gone afterwards.
    ///
    /// # Errors
    /// Fails when the file cannot be read or written.
    pub fn update(&mut self, layer: usize, change: &mut ParameterChange<'_>) -> Result<()> {
        for place in 0..self.specs.len() {
            if let StoreSlots::Memory(slots) = &mut self.store {
                let slot = &mut slots[layer][place];
                let mut gradient = std::mem::take(&mut slot.gradient);
                let StoredParameter { values, state, kept, .. } = slot;
                let (gradient, kept) = (&mut gradient[..], kept.as_mut());
                change(ChangedParameter { place, values, gradient, kept, state });
                continue;
            }
            let mut values = self.read_floats(layer, place, DataKind::Values)?;
            let mut gradient = self.read_floats(layer, place, DataKind::Gradient)?;
            let mut state = vec![0; self.state_bytes[place]];
            self.read(layer, place, DataKind::State, &mut state)?;
            let mut kept = self.mask(layer, place)?;
            change(ChangedParameter {
                place,
                values: &mut values,
                gradient: &mut gradient,
                kept: kept.as_mut(),
                state: &mut state,
            });
            self.write(layer, place, DataKind::Values, bytemuck::cast_slice(&values))?;
            self.write(layer, place, DataKind::State, &state)?;
            if let Some(kept) = kept.filter(|_| self.closes) {
                self.write(layer, place, DataKind::Kept, kept.bits())?;
            }
        }
        Ok(())
    }

    /// Keeps the current values as the best.
    ///
    /// # Errors
    /// Fails when the file cannot be read or written.
    pub fn keep_best(&mut self) -> Result<()> {
        for layer in 0..self.layers {
            for at in 0..self.specs.len() {
                if let StoreSlots::Memory(slots) = &mut self.store {
                    let slot = &mut slots[layer][at];
                    slot.best.clone_from(&slot.values);
                } else {
                    let values = self.read_floats(layer, at, DataKind::Values)?;
                    self.write(layer, at, DataKind::Best, bytemuck::cast_slice(&values))?;
                }
            }
        }
        self.has_best = true;
        Ok(())
    }

    /// Goes back to the best values, with fresh optimizer states.
    ///
    /// # Errors
    /// Fails when the file cannot be read or written.
    pub fn return_to_best(&mut self) -> Result<()> {
        for layer in 0..self.layers {
            for at in 0..self.specs.len() {
                if let StoreSlots::Memory(slots) = &mut self.store {
                    let slot = &mut slots[layer][at];
                    slot.values.clone_from(&slot.best);
                    slot.state.fill(0);
                    continue;
                }
                let best = self.read_floats(layer, at, DataKind::Best)?;
                self.write(layer, at, DataKind::Values, bytemuck::cast_slice(&best))?;
                let fresh = vec![0; self.state_bytes[at]];
                self.write(layer, at, DataKind::State, &fresh)?;
            }
        }
        Ok(())
    }

    /// Writes values and states of all layers, masks that close, and the best values where they are kept.
    ///
    /// # Errors
    /// Fails when the file cannot be read or `out` cannot be written.
    pub fn save(&self, out: &mut dyn Write) -> Result<()> {
        let masks = if self.closes { HAS_MASKS } else { 0 };
        let best = if self.has_best { HAS_BEST } else { 0 };
        out.write_all(&[best | masks])?;
        for layer in 0..self.layers {
            // The data of a parameter go out kind by kind: all data of a layer would be the largest part of a step's memory.
            for at in 0..self.specs.len() {
                self.copy(layer, at, DataKind::Values, out)?;
                self.copy(layer, at, DataKind::State, out)?;
                if self.closes {
                    self.copy(layer, at, DataKind::Kept, out)?;
                }
                if self.has_best {
                    self.copy(layer, at, DataKind::Best, out)?;
                }
            }
        }
        Ok(())
    }

    /// Copies data of a parameter.
    fn copy(&self, layer: usize, at: usize, kind: DataKind, out: &mut dyn Write) -> Result<()> {
        match &self.store {
            StoreSlots::Memory(slots) => {
                let slot = &slots[layer][at];
                out.write_all(match kind {
                    DataKind::State => &slot.state,
                    DataKind::Kept => slot.kept.as_ref().map_or(&[], KeptMask::bits),
                    DataKind::Best => bytemuck::cast_slice(&slot.best),
                    _ => bytemuck::cast_slice(&slot.values),
                })?;
            }
            StoreSlots::File(_) => {
                let mut bytes = vec![0; self.size(at, kind) as usize];
                self.read(layer, at, kind, &mut bytes)?;
                out.write_all(&bytes)?;
            }
        }
        Ok(())
    }

    /// Reads what [`ParameterStore::save`] has written. Masks that do not close stay as [`ParameterStore::put`] stored them.
    ///
    /// # Errors
    /// Fails when `from` ends early or has masks of the other kind, and when the file cannot be written.
    pub fn load(&mut self, from: &mut dyn Read) -> Result<()> {
        let mut flags = [0];
        from.read_exact(&mut flags)?;
        self.has_best = flags[0] & HAS_BEST != 0;
        let has_masks = flags[0] & HAS_MASKS != 0;
        ensure!(
            has_masks == self.closes,
            "masks close in only one of the saved and the present training"
        );
        for layer in 0..self.layers {
            for at in 0..self.specs.len() {
                let mut values = vec![0f32; self.specs[at].elements()];
                from.read_exact(bytemuck::cast_slice_mut(&mut values))?;
                let mut state = vec![0; self.state_bytes[at]];
                from.read_exact(&mut state)?;
                let mut bits = Vec::new();
                if self.closes {
                    bits.resize(self.size(at, DataKind::Kept) as usize, 0);
                    from.read_exact(&mut bits)?;
                }
                let mut best = Vec::new();
                if self.has_best {
                    best.resize(values.len(), 0f32);
                    from.read_exact(bytemuck::cast_slice_mut(&mut best))?;
                }
                if let StoreSlots::Memory(slots) = &mut self.store {
                    let slot = &mut slots[layer][at];
                    if !bits.is_empty() {
                        slot.kept = KeptMask::from_bits(bits, values.len());
                    }
                    (slot.values, slot.state, slot.best) = (values, state, best);
                    continue;
                }
                self.write(layer, at, DataKind::Values, bytemuck::cast_slice(&values))?;
                self.write(layer, at, DataKind::State, &state)?;
                if !bits.is_empty() {
                    self.write(layer, at, DataKind::Kept, &bits)?;
                }
                if self.has_best {
                    self.write(layer, at, DataKind::Best, bytemuck::cast_slice(&best))?;
                }
            }
        }
        Ok(())
    }

    /// Bytes of a kind of data of a parameter.
    fn size(&self, at: usize, kind: DataKind) -> u64 {
        let spec = &self.specs[at];
        (match kind {
            DataKind::Values | DataKind::Gradient | DataKind::Best => 4 * spec.elements(),
            DataKind::State => self.state_bytes[at],
            DataKind::Kept if spec.has_mask() => spec.elements().div_ceil(8),
            DataKind::Kept => 0,
        }) as u64
    }

    /// The place of data in the file.
    fn offset(&self, layer: usize, at: usize, kind: DataKind) -> u64 {
        let whole =
            |at: usize| -> u64 { DataKind::ALL.iter().map(|&kind| self.size(at, kind)).sum() };
        let record: u64 = (0..self.specs.len()).map(whole).sum();
        let before = DataKind::ALL.iter().take_while(|&&other| other != kind);
        layer as u64 * record
            + (0..at).map(whole).sum::<u64>()
            + before.map(|&other| self.size(at, other)).sum::<u64>()
    }

    fn read(&self, layer: usize, at: usize, kind: DataKind, bytes: &mut [u8]) -> Result<()> {
        let StoreSlots::File(file) = &self.store else {
            return Ok(());
        };
        positioned::read_exact_at(file, bytes, self.offset(layer, at, kind))
            .context("reading parameters from the offload folder")
    }

    fn read_floats(&self, layer: usize, at: usize, kind: DataKind) -> Result<Vec<f32>> {
        let mut values = vec![0f32; self.specs[at].elements()];
        self.read(layer, at, kind, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn write(&self, layer: usize, at: usize, kind: DataKind, bytes: &[u8]) -> Result<()> {
        let StoreSlots::File(file) = &self.store else {
            return Ok(());
        };
        positioned::write_all_at(file, bytes, self.offset(layer, at, kind)).map_err(|error| {
            crate::failure::Failure::new(format!("cannot write parameters: {error}"))
                .detail("they are in a file in the offload folder (--optim paged-…)")
                .hint("name a folder on a larger disk with --offload-folder")
                .into()
        })
    }
}

impl StorePlace {
    /// The folder of the file; `None` in memory.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Memory => None,
            Self::File(folder) => Some(folder),
        }
    }
}
