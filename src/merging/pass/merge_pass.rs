//! [`MergePass`]: the loop over the tensors of the output.
//!
//! Workers take tensors, embedding and head first. Each reads the rows of all sources in pieces, merges them and writes the merged rows. No
//! tensor is ever whole in memory: a worker holds a piece of each source, the merged piece and its bytes. Some workers compute while
//! some wait for the disk.
//!
//! A tensor has a single worker at a time, and its rows come in order. So the result depends neither on the number of workers nor on the
//! size of pieces. Tensors that are trimmed together are all measured before the first of them is merged.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::devices::MergeDevice;
use super::other_ranks::{OtherRanks, ToFirstRank, own_share};
use super::rows::MergeSources;
use super::worker::{Worker, source_tasks, task_of};
use crate::checkpoint::LayoutWriter;
use crate::linalg::StoredDtype;
use crate::merging::methods::{Group, MergeMethod, MethodSettings, Scope};
use crate::merging::recipe::TensorRecipe;
use crate::ranks::Ranks;
use crate::run::merging::MergedTensor;
use crate::run::{Event, Events};

/// The longest time between two records of finished tensors.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A pause is this many times as long as the last record took: records are a quarter of the time of the thread that writes them.
const PAUSES_PER_RECORD: u32 = 3;

/// The time between two looks for the reports of other ranks.
const LOOK: Duration = Duration::from_millis(20);

/// A tensor of the output.
#[derive(Debug, Clone)]
pub struct MergeTensor {
    /// Its sources and values.
    pub recipe: TensorRecipe,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// The dtype it is written in.
    pub dtype: StoredDtype,
    /// Per source: means of x² per input column, for the method; `None` without statistics.
    pub squares: Vec<Option<Arc<[f32]>>>,
    /// Per source: means of x² per input column, for the output errors; `None` without statistics.
    pub observed: Vec<Option<Arc<[f32]>>>,
}

impl MergeTensor {
    /// Rows and columns; a vector is one row.
    pub fn matrix(&self) -> (usize, usize) {
        match self.shape.split_last() {
            Some((&columns, rows)) => (rows.iter().product(), columns),
            None => (1, 1),
        }
    }

    /// Its elements.
    pub fn elements(&self) -> u64 {
        let (rows, columns) = self.matrix();
        rows as u64 * columns as u64
    }

    /// Begins the merge and ends it, so that values without a result are found before the pass. Returns the number of times that
    /// every row is read.
    ///
    /// # Errors
    /// Fails as [`MergeMethod::begin`].
    pub fn check(&self, method: &dyn MergeMethod, settings: &MethodSettings) -> Result<usize> {
        let tasks = source_tasks(self);
        let group = Group::new(self.elements());
        let merge = method.begin(&task_of(self, &tasks, settings), &group)?;
        Ok(merge.reads() + 1)
    }

    /// Its module: `model.layers.7.mlp.up_proj`.
    pub fn module(&self) -> &str {
        let name = &self.recipe.name;
        name.strip_suffix(".weight").unwrap_or(name)
    }

    /// True for a linear of a decoder layer, which progress counts.
    pub fn is_linear(&self) -> bool {
        self.recipe.layer.is_some() && self.shape.len() == 2
    }
}

/// The pass over all tensors.
pub struct MergePass<'a> {
    /// The method.
    pub method: &'static dyn MergeMethod,
    /// Settings of the method.
    pub settings: MethodSettings,
    /// All tensors of the output, in its order.
    pub tensors: &'a [MergeTensor],
    /// The input models.
    pub inputs: &'a dyn MergeSources,
    /// The output.
    pub writer: &'a LayoutWriter,
    /// Devices that compute linears in place of the CPU.
    pub devices: &'a [MergeDevice],
    /// The ranks that share the tensors.
    pub ranks: &'a Ranks,
    /// Threads.
    pub workers: usize,
    /// Elements of a piece; at least one row is read.
    pub piece_elements: usize,
    /// Weights that are zero in every source stay zero.
    pub keep_zeros: bool,
    /// The receiver of events.
    pub events: &'a dyn Events,
}

/// The receiver of finished tensors, whose bytes are on the disk.
pub trait MergeJournal {
    /// Records tensors that were finished since the last call. `digests` has all finished tensors with the SHA-256 of their bytes.
    ///
    /// # Errors
    /// Fails when the record cannot be written.
    fn tensors_done(
        &mut self,
        tensors: Vec<MergedTensor>,
        digests: BTreeMap<String, String>,
    ) -> Result<()>;
}

/// Tensors that are trimmed together, by index.
pub(super) struct Groups {
    groups: Vec<Group>,
    of: Vec<usize>,
    /// True if groups may hold several tensors. Then all tensors are measured before the first is merged.
    pub(super) are_shared: bool,
}

impl Groups {
    /// The groups of a scope.
    fn new(tensors: &[MergeTensor], scope: Scope) -> Self {
        let mut numbers: HashMap<Option<usize>, usize> = HashMap::new();
        let mut elements: Vec<u64> = Vec::new();
        let mut of = Vec::with_capacity(tensors.len());
        for (at, tensor) in tensors.iter().enumerate() {
            let number = match scope {
                Scope::Tensor => at,
                // Tensors outside of layers form a group.
                Scope::Layer => {
                    let next = numbers.len();
                    *numbers.entry(tensor.recipe.layer).or_insert(next)
                }
                Scope::Model => 0,
            };
            if number == elements.len() {
                elements.push(0);
            }
            // Tensors with statistics are trimmed row by row.
            if tensor.squares.iter().all(Option::is_none) {
                elements[number] += tensor.elements();
            }
            of.push(number);
        }
        Self {
            groups: elements.into_iter().map(Group::new).collect(),
            of,
            are_shared: scope != Scope::Tensor,
        }
    }

    /// The group of a tensor.
    pub(super) fn of(&self, tensor: usize) -> &Group {
        &self.groups[self.of[tensor]]
    }
}

impl MergePass<'_> {
    /// Merges the share of a rank that is not the first, which records it.
    ///
    /// # Errors
    /// Fails as [`MergePass::run`].
    pub fn run_for_first_rank(&self) -> Result<()> {
        let mut journal = ToFirstRank(self.ranks);
        self.run(&mut journal)?;
        journal.end()
    }

    /// Merges all tensors that the writer has no record of, together with other ranks. The journal gets the counts.
    ///
    /// # Errors
    /// Fails with the first error of a worker: a tensor that cannot be read, values that are not finite, a full disk; and when a rank has
    /// left. What is finished by then is recorded.
    pub fn run(&self, journal: &mut dyn MergeJournal) -> Result<()> {
        let groups = Groups::new(self.tensors, self.method.scope(&self.settings));
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        // Embedding and head are the largest tensors. If they came last, few workers would be busy at the end. The layers follow in
        // their order.
        order.sort_by_key(|&at| {
            let tensor = &self.tensors[at];
            let outside = tensor.recipe.layer.is_none();
            let elements = if outside { tensor.elements() } else { 0 };
            (std::cmp::Reverse(elements), tensor.recipe.layer, at)
        });
        if groups.are_shared {
            self.measure_groups(&groups, &order)?;
        }
        let left: Vec<usize> = order
            .into_iter()
            .filter(|&at| !self.writer.is_recorded(&self.tensors[at].recipe.name))
            .collect();
        let linears = |indices: &mut dyn Iterator<Item = usize>| {
            indices.filter(|&at| self.tensors[at].is_linear()).count()
        };
        let total = linears(&mut (0..self.tensors.len()));
        let progress = MergeProgress {
            begun: Instant::now(),
            total,
            done: AtomicUsize::new(total - linears(&mut left.iter().copied())),
            elements: left.iter().map(|&at| self.tensors[at].elements()).sum(),
            elements_done: AtomicU64::new(0),
        };
        let own = own_share(left, self.tensors, self.ranks);
        self.merge(&groups, &own, &progress, journal)
    }

    /// Measures all tensors, read by read.
    fn measure_groups(&self, groups: &Groups, order: &[usize]) -> Result<()> {
        let mut read = 0;
        loop {
            let more = AtomicBool::new(false);
            self.for_each(order, |worker, at| {
                let reads = worker.measure(at, groups, read)?;
                more.fetch_or(read + 1 < reads, Ordering::Relaxed);
                Ok(())
            })?;
            groups.groups.iter().for_each(Group::settle);
            read += 1;
            if !more.into_inner() {
                return Ok(());
            }
        }
    }

    /// Merges tensors, and records finished tensors meanwhile.
    fn merge(
        &self,
        groups: &Groups,
        left: &[usize],
        progress: &MergeProgress,
        journal: &mut dyn MergeJournal,
    ) -> Result<()> {
        let (sender, receiver) = mpsc::channel::<MergedTensor>();
        let sender = Mutex::new(Some(sender));
        let has_failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                let merged = self.for_each(left, |worker, at| {
                    let merged = worker.merge(at, groups)?;
                    let tensor = &self.tensors[at];
                    self.count(tensor, progress);
                    if let Some(sender) = &*lock(&sender) {
                        // The receiver lives as long as this scope.
                        let _ = sender.send(merged);
                    }
                    Ok(())
                });
                has_failed.store(merged.is_err(), Ordering::Relaxed);
                // Ends the loop below.
                lock(&sender).take();
                merged
            });
            let recorded = self.record((&receiver, &has_failed), progress, journal);
            let merged = work.join().expect("a panic ends the process");
            merged.and(recorded)
        })
    }

    /// Counts a merged tensor for the progress.
    fn count(&self, tensor: &MergeTensor, progress: &MergeProgress) {
        progress.elements_done.fetch_add(tensor.elements(), Ordering::Relaxed);
        if tensor.is_linear() {
            self.events.emit(progress.step(tensor.module()));
        }
    }

    /// Records finished tensors, until there are no more: each at once, unless the last record took long. A killed merge repeats the
    /// tensors in progress, and the tensors that were finished in the last pause. The first rank waits for the shares of the other ranks,
    /// unless its own share has failed.
    fn record(
        &self,
        (finished, has_failed): (&mpsc::Receiver<MergedTensor>, &AtomicBool),
        progress: &MergeProgress,
        journal: &mut dyn MergeJournal,
    ) -> Result<()> {
        let (mut waiting, mut next) = (Vec::new(), Instant::now());
        let (mut others, mut ended) = (OtherRanks::of(self.ranks), None);
        loop {
            let pause = match waiting.is_empty() {
                _ if others.are_working() => LOOK,
                true => LONGEST_PAUSE,
                false => next.saturating_duration_since(Instant::now()),
            };
            let mut is_over = match finished.recv_timeout(pause) {
                Ok(tensor) => {
                    waiting.push(tensor);
                    false
                }
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            };
            if others.are_working() {
                match self.take_reports(&mut others, progress) {
                    Ok(arrived) => waiting.extend(arrived),
                    // The workers stop by themselves, and what is finished is recorded.
                    Err(error) => {
                        others.forget();
                        ended = Some(error);
                    }
                }
                if is_over && others.are_working() && !has_failed.load(Ordering::Relaxed) {
                    is_over = false;
                    std::thread::sleep(LOOK);
                }
            }
            let began = Instant::now();
            if !waiting.is_empty() && (began >= next || is_over) {
                waiting.extend(finished.try_iter());
                // The digests are of tensors that were complete before the sync, so all that wait are among them.
                let digests = self.writer.sync()?;
                journal.tensors_done(std::mem::take(&mut waiting), digests)?;
                let pause = (began.elapsed() * PAUSES_PER_RECORD).min(LONGEST_PAUSE);
                next = Instant::now() + pause;
            }
            if is_over {
                return ended.map_or(Ok(()), Err);
            }
        }
    }

    /// Takes the reports that have arrived from other ranks, unless the run should stop.
    fn take_reports(
        &self,
        others: &mut OtherRanks<'_>,
        progress: &MergeProgress,
    ) -> Result<Vec<MergedTensor>> {
        self.events.check()?;
        let arrived = others.arrived(self.writer)?;
        let names: HashSet<&str> = arrived.iter().map(|of| of.name.as_str()).collect();
        let tensors = self.tensors.iter();
        tensors
            .filter(|tensor| names.contains(tensor.recipe.name.as_str()))
            .for_each(|tensor| self.count(tensor, progress));
        Ok(arrived)
    }

    /// Calls `work` for each index, on all workers; the first error ends all of them.
    fn for_each(
        &self,
        indices: &[usize],
        work: impl Fn(&mut Worker<'_>, usize) -> Result<()> + Sync,
    ) -> Result<()> {
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<anyhow::Error>> = Mutex::new(None);
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for number in 0..self.workers.clamp(1, indices.len().max(1)) {
                let (next, failed, ends, work) = (&next, &failed, &ends, &work);
                // The devices share the workers.
                let device = self.devices.iter().cycle().nth(number);
                scope.spawn(move || {
                    let mut worker = Worker::new(self, device, ends);
                    while let Some(&at) = indices.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(error) = work(&mut worker, at) {
                            ends.store(true, Ordering::Relaxed);
                            lock(failed).get_or_insert(error);
                        }
                        if ends.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                });
            }
        });
        let failed = failed.into_inner();
        match failed.unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A thread that panics ends the process.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Linears that are merged, and elements for the time that is left.
struct MergeProgress {
    begun: Instant,
    total: usize,
    done: AtomicUsize,
    elements: u64,
    elements_done: AtomicU64,
}

impl MergeProgress {
    /// Counts a merged linear, and returns the event for it.
    fn step(&self, tensor: &str) -> Event {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let elements = self.elements_done.load(Ordering::Relaxed).max(1) as f64;
        let seconds = self.begun.elapsed().as_secs_f64();
        Event::MatrixMerged {
            name: tensor.to_string(),
            done,
            of: self.total,
            seconds_left: seconds * (self.elements as f64 / elements - 1.0),
        }
    }
}
