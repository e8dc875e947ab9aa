//! The hidden states of a stream of samples, on the GPUs that compute, in RAM or in a spill file.
//!
//! Samples are independent, so a pass takes a state, runs it through a layer and puts the result back in its place: a single
//! set of states, not two. They are stored in the dtype of the arithmetic (f32 on the CPU, the checkpoint's on GPUs), so storing them
//! changes no bit: the masks are the same in RAM and on disk. On several GPUs a sample stays on the GPU whose turn its block is. On several
//! ranks it stays on its rank: samples are numbered within the rank, and [`HiddenStates::share`] knows their numbers in the run.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::blocks::SampleBlocks;
use super::engine::OutOfMemory;
use super::share::SampleShare;
use super::spill::spill_file;
use crate::bytes::ByteSize;
use crate::disk::positioned;
use crate::failure::Failure;
use crate::linalg::{StoredMatrix, tensor};
use crate::model::on_device::copy;
use crate::model::segments::{self, Segment};
use crate::run::Events;

/// `samples` hidden states of `[seqlen, hidden_size]`.
#[derive(Debug)]
pub struct HiddenStates {
    shape: [usize; 2],
    dtype: DType,
    store: Store,
    /// The devices of the states in memory, which have the blocks of samples in turn; empty for the host.
    homes: Vec<Device>,
    share: SampleShare,
    /// The sequences of each sample, where samples have several and differ in their lengths; else empty.
    packs: Vec<Arc<[Segment]>>,
    /// The first row of each of these samples among all rows.
    first_rows: Vec<usize>,
}

/// Samples of several sequences.
pub struct PackedSamples {
    /// The samples of this rank.
    pub share: SampleShare,
    /// The sequences of each sample of this rank.
    pub segments: Vec<Arc<[Segment]>>,
    /// The width of a state.
    pub hidden_size: usize,
}

#[derive(Debug)]
enum Store {
    Ram(Vec<Option<Tensor>>),
    Spill { file: File, samples: usize },
}

impl HiddenStates {
    /// Makes room for `samples` states.
    ///
    /// # Arguments
    /// * `spill_folder`: the folder of the spill file; `None` keeps the states in memory. No file remains after the run
    /// * `shape`: of a state: seqlen, hidden_size
    /// * `dtype`: the dtype of the stored states: f32, f16 or bf16
    ///
    /// # Errors
    /// Fails when the spill file cannot be created.
    pub fn new(
        spill_folder: Option<&Path>,
        samples: usize,
        shape: [usize; 2],
        dtype: DType,
    ) -> Result<Self> {
        let store = match spill_folder {
            None => Store::Ram(vec![None; samples]),
            Some(folder) => Store::Spill { file: spill_file(folder)?, samples },
        };
        let share = SampleShare::whole(samples);
        let (homes, packs, first_rows) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { shape, dtype, store, homes, share, packs, first_rows })
    }

    /// The states in a file, as [`HiddenStates::write_to`] leaves them. The file stays where it is.
    ///
    /// # Arguments
    /// * `samples`, `shape`, `dtype`: as in [`HiddenStates::new`]
    pub fn of_file(file: File, samples: usize, shape: [usize; 2], dtype: DType) -> Self {
        let store = Store::Spill { file, samples };
        let share = SampleShare::whole(samples);
        let (homes, packs, first_rows) = (Vec::new(), Vec::new(), Vec::new());
        Self { shape, dtype, store, homes, share, packs, first_rows }
    }

    /// The size of a file with the states of the samples of all ranks.
    pub fn file_bytes(samples: usize, [seqlen, hidden_size]: [usize; 2], dtype: DType) -> u64 {
        (samples * seqlen * hidden_size * dtype.size_in_bytes()) as u64
    }

    /// Writes the states of this rank into a file that has room for the states of all ranks: sample by sample, in the stored dtype.
    ///
    /// # Errors
    /// Fails when a state cannot be read, or the file cannot be written.
    pub fn write_to(&mut self, file: &File) -> Result<()> {
        let numbers = self.share.own().to_vec();
        for (sample, number) in numbers.into_iter().enumerate() {
            let state = self.stored(sample)?.to_device(&Device::Cpu)?.contiguous()?;
            let at = number as u64 * self.state_bytes() as u64;
            tensor::with_bytes(&state, |bytes| positioned::write_all_at(file, bytes, at))??;
        }
        Ok(())
    }

    /// Makes room for samples of several sequences, as [`HiddenStates::new`] does.
    ///
    /// # Errors
    /// As [`HiddenStates::new`].
    pub fn of_packs(
        spill_folder: Option<&Path>,
        packs: PackedSamples,
        dtype: DType,
    ) -> Result<Self> {
        let PackedSamples { share, segments: packs, hidden_size } = packs;
        let longest = packs.iter().map(|of| segments::tokens(of)).max().unwrap_or(0);
        let states = Self::of_share(spill_folder, share, [longest, hidden_size], dtype)?;
        let first_rows = packs.iter().scan(0, |next, of| {
            let first = *next;
            *next += segments::tokens(of);
            Some(first)
        });
        Ok(Self { first_rows: first_rows.collect(), packs, ..states })
    }

    /// The sequences of a sample that has several.
    pub fn segments(&self, sample: usize) -> Option<Arc<[Segment]>> {
        self.packs.get(sample).map(Arc::clone)
    }

    /// The shape of a sample's state.
    fn shape_of(&self, sample: usize) -> [usize; 2] {
        let [seqlen, hidden_size] = self.shape;
        let tokens = self.packs.get(sample).map_or(seqlen, |of| segments::tokens(of));
        [tokens, hidden_size]
    }

    /// Makes room for the states of the samples of a rank, as [`HiddenStates::new`] does.
    ///
    /// # Errors
    /// As [`HiddenStates::new`].
    pub fn of_share(
        spill_folder: Option<&Path>,
        share: SampleShare,
        shape: [usize; 2],
        dtype: DType,
    ) -> Result<Self> {
        let states = Self::new(spill_folder, share.own().len(), shape, dtype)?;
        Ok(Self { share, ..states })
    }

    /// The numbers of the samples in the run.
    pub fn share(&self) -> &SampleShare {
        &self.share
    }

    /// Keeps the states on these devices, which get the blocks of samples in turn.
    #[must_use]
    pub fn on_devices(self, homes: Vec<Device>) -> Self {
        Self { homes, ..self }
    }

    /// Returns whether the states stay on devices.
    pub fn is_on_device(&self) -> bool {
        !self.homes.is_empty()
    }

    /// The states that their device had no memory for, and which are in host memory.
    pub fn displaced(&self) -> usize {
        let Store::Ram(states) = &self.store else {
            return 0;
        };
        let is_displaced = |(sample, state): &(usize, &Option<Tensor>)| {
            let home = self.home(*sample).is_some_and(|home| !home.is_cpu());
            home && state.as_ref().is_some_and(|state| state.device().is_cpu())
        };
        states.iter().enumerate().filter(is_displaced).count()
    }

    /// Warns where more states than `before` have no room on their device.
    pub fn warn_of_displaced(&self, before: usize, events: &dyn Events) {
        let (now, samples) = (self.displaced(), self.samples());
        if now > before {
            events.warn(format!(
                "{now} of {samples} hidden states have no room on their GPU and are in RAM: the run is slower"
            ));
        }
    }

    fn home(&self, sample: usize) -> Option<&Device> {
        let block = SampleBlocks::new(self.samples()).block_of(sample);
        self.homes.get(block % self.homes.len().max(1))
    }

    /// The number of samples on this rank.
    pub fn samples(&self) -> usize {
        match &self.store {
            Store::Ram(states) => states.len(),
            Store::Spill { samples, .. } => *samples,
        }
    }

    /// Tokens per sample; of the longest where samples differ.
    pub fn seqlen(&self) -> usize {
        self.shape[0]
    }

    /// Returns the state of a sample on the host, `[seqlen, hidden_size]` in f32.
    ///
    /// # Errors
    /// Fails when the state was never put, and when the spill file cannot be read.
    pub fn get(&mut self, sample: usize) -> Result<Tensor> {
        Ok(self.stored(sample)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?)
    }

    /// Returns the state of a sample in its stored dtype, where it is.
    pub fn stored(&mut self, sample: usize) -> Result<Tensor> {
        let (shape, at) = (self.shape_of(sample), self.offset(sample));
        match &mut self.store {
            Store::Ram(states) => states
                .get(sample)
                .and_then(Option::as_ref)
                .cloned()
                .context("a hidden state is read before it was written"),
            Store::Spill { file, .. } => {
                let read = |bytes: &mut [u8]| {
                    positioned::read_exact_at(file, bytes, at)
                        .context("reading hidden states from the spill file")
                };
                state_from(self.dtype, shape, read)
            }
        }
    }

    /// Bytes of the states of this rank.
    pub fn all_bytes(&self) -> u64 {
        let elements =
            (0..self.samples()).map(|sample| self.shape_of(sample).iter().product::<usize>());
        (elements.sum::<usize>() * self.dtype.size_in_bytes()) as u64
    }

    /// Writes the states of this rank, sample by sample, in the stored dtype.
    ///
    /// # Errors
    /// Fails when a state cannot be read, and when `file` cannot be written.
    pub fn write_all(&mut self, file: &mut dyn Write) -> Result<()> {
        for sample in 0..self.samples() {
            let state = self.stored(sample)?.to_device(&Device::Cpu)?.contiguous()?;
            tensor::with_bytes(&state, |bytes| file.write_all(bytes))??;
        }
        Ok(())
    }

    /// Replaces the states by states of [`HiddenStates::write_all`].
    ///
    /// # Errors
    /// Fails when `file` is too short or cannot be read, and as [`HiddenStates::put`].
    pub fn read_all(&mut self, file: &mut dyn Read) -> Result<()> {
        for sample in 0..self.samples() {
            let shape = self.shape_of(sample);
            let read = |bytes: &mut [u8]| Ok(file.read_exact(bytes)?);
            self.put(sample, state_from(self.dtype, shape, read)?)?;
        }
        Ok(())
    }

    /// Puts the state of a sample, `[seqlen, hidden_size]` in any dtype, as [`HiddenStates::put`] does. A device copies it unchanged.
    ///
    /// # Errors
    /// As [`HiddenStates::put`].
    pub fn put_stored(&mut self, sample: usize, state: &StoredMatrix) -> Result<()> {
        let to = |device: &Device| -> Result<Tensor> { copy(state, device) };
        let copied = match self.home(sample).map(to) {
            Some(Err(error)) if OutOfMemory::of(&error).is_none() => return Err(error),
            Some(Ok(copied)) => copied,
            None | Some(Err(_)) => to(&Device::Cpu)?,
        };
        self.put(sample, copied)
    }

    /// Replaces the state of a sample. A device without memory for it leaves it on the host.
    ///
    /// # Errors
    /// Fails for a state with a wrong shape, and when the spill file cannot be written.
    pub fn put(&mut self, sample: usize, state: Tensor) -> Result<()> {
        ensure!(
            state.dims() == self.shape_of(sample),
            "a hidden state of {:?} does not fit {:?}",
            state.dims(),
            self.shape_of(sample)
        );
        let state = self.at_home(sample, state)?;
        let (samples, at) = (self.samples(), self.offset(sample));
        let bytes = self.state_bytes();
        match &mut self.store {
            Store::Ram(states) => {
                *states.get_mut(sample).context("a hidden state beyond the last sample")? =
                    Some(state)
            }
            Store::Spill { file, .. } => {
                let write = |bytes: &[u8]| positioned::write_all_at(file, bytes, at);
                let written = tensor::with_bytes(&state, write)?;
                written.map_err(|error| {
                    Failure::new(format!("cannot spill hidden states: {error}"))
                        .detail(format!("this stream needs {} of disk", ByteSize::of(samples, bytes)))
                        .hint("name a folder on a larger disk with --offload-folder, or use fewer --nsamples or --eval-windows")
                })?;
            }
        }
        Ok(())
    }

    /// A state in the stored dtype, on the device of its sample, or on the host where that device has no memory.
    fn at_home(&self, sample: usize, state: Tensor) -> Result<Tensor> {
        let on_host = |state: &Tensor| -> Result<Tensor> {
            Ok(state.to_device(&Device::Cpu)?.to_dtype(self.dtype)?)
        };
        let Some(home) = self.home(sample) else {
            return on_host(&state);
        };
        let moved = || -> Result<Tensor> { Ok(state.to_device(home)?.to_dtype(self.dtype)?) };
        match moved() {
            Ok(moved) => {
                if !state.device().is_cpu() && !state.device().same_device(home) {
                    // The copy between two GPUs must be over before the memory of `state` is used again.
                    home.synchronize()?;
                }
                Ok(moved)
            }
            Err(error) if OutOfMemory::of(&error).is_some() => on_host(&state),
            Err(error) => Err(error.context("moving a hidden state to its device")),
        }
    }

    /// Frees all states, and the spill file.
    pub fn clear(&mut self) {
        self.store = Store::Ram(Vec::new());
    }

    fn state_bytes(&self) -> usize {
        self.shape[0] * self.shape[1] * self.dtype.size_in_bytes()
    }

    fn offset(&self, sample: usize) -> u64 {
        match self.first_rows.get(sample) {
            Some(&row) => row as u64 * (self.shape[1] * self.dtype.size_in_bytes()) as u64,
            None => sample as u64 * self.state_bytes() as u64,
        }
    }
}

/// A state on the host from its bytes, which `read` fills in.
fn state_from(
    dtype: DType,
    shape: [usize; 2],
    read: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<Tensor> {
    let elements = shape[0] * shape[1];
    match dtype {
        DType::BF16 => {
            let mut values = vec![bf16::ZERO; elements];
            read(bytemuck::cast_slice_mut(&mut values))?;
            Ok(Tensor::from_vec(values, &shape, &Device::Cpu)?)
        }
        DType::F16 => {
            let mut values = vec![f16::ZERO; elements];
            read(bytemuck::cast_slice_mut(&mut values))?;
            Ok(Tensor::from_vec(values, &shape, &Device::Cpu)?)
        }
        _ => {
            let mut values = vec![0.0f32; elements];
            read(bytemuck::cast_slice_mut(&mut values))?;
            tensor::from_vec(values, &shape)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(value: f32) -> Tensor {
        tensor::from_vec(vec![value; 6], &[2, 3]).unwrap()
    }

    #[test]
    fn states_rest_in_ram_or_on_disk_alike_and_leave_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        let spill_folders = [None, Some(folder.path())];
        for (spill_folder, dtype) in
            spill_folders.into_iter().flat_map(|folder| dtypes.map(|dtype| (folder, dtype)))
        {
            let mut states = HiddenStates::new(spill_folder, 3, [2, 3], dtype).unwrap();
            for sample in 0..3 {
                states.put(sample, state(sample as f32)).unwrap();
            }
            for sample in 0..3 {
                let state = states.get(sample).unwrap();
                states.put(sample, (state + sample as f64).unwrap()).unwrap();
            }
            for sample in 0..3 {
                assert_eq!(
                    states.get(sample).unwrap().to_vec2::<f32>().unwrap(),
                    [[2.0 * sample as f32; 3]; 2]
                );
            }
            assert!(states.put(0, tensor::from_vec(vec![0.0; 6], &[3, 2]).unwrap()).is_err());
            #[cfg(unix)]
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn samples_of_different_lengths_rest_in_ram_or_on_disk_alike() {
        let folder = tempfile::tempdir().unwrap();
        for spill_folder in [None, Some(folder.path())] {
            let pack = |rows: usize| Arc::from([Segment::alone(0..rows)]);
            let packs = PackedSamples {
                share: SampleShare::whole(3),
                segments: vec![pack(3), pack(1), pack(2)],
                hidden_size: 2,
            };
            let mut states = HiddenStates::of_packs(spill_folder, packs, DType::F32).unwrap();
            for (sample, rows) in [(2, 2), (0, 3), (1, 1)] {
                let state = tensor::from_vec(vec![sample as f32; rows * 2], &[rows, 2]).unwrap();
                states.put(sample, state).unwrap();
            }
            for (sample, rows) in [(0, 3), (1, 1), (2, 2)] {
                let state = states.get(sample).unwrap().to_vec2::<f32>().unwrap();
                assert_eq!(state, vec![vec![sample as f32; 2]; rows]);
            }
            assert!(states.put(1, state(1.0)).is_err(), "a state of two tokens for one");
        }
    }

    #[test]
    fn a_state_that_was_never_put_is_an_error() {
        assert!(HiddenStates::new(None, 1, [2, 3], DType::F32).unwrap().get(0).is_err());
    }
}
