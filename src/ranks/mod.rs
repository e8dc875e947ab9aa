//! The ranks of a run: processes on one or several machines that share its samples and windows.
//!
//! All ranks execute the same commands in the same order. They send bytes and add numbers themselves, in the order of samples and blocks,
//! so results have the bits of a single process. No floating-point reduction of MPI is used.
//!
//! | file | content |
//! | --- | --- |
//! | `arrays` | arrays that all ranks hold: parts that are put together, integers that are added up |
//! | `launcher` | the environment of a launcher: the number of processes it has started |
//! | `mpi` | the door to MPI: the only file that calls it (feature `mpi`) |
//! | `neighbors` | the ranks of a machine: its threads and memory are divided among them |
//! | `threads` | ranks that are threads of a single process, for tests |
//!
//! A message is at most [`PIECE`] bytes long, so memory and waiting stay bounded. A wait ends with an error as soon as a rank has left the
//! run.

use std::collections::VecDeque;
use std::fmt::{self, Debug, Formatter};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::run::Stopped;
use neighbors::{Neighbors, RankPlace};

pub mod arrays;
pub mod launcher;
#[cfg(feature = "mpi")]
mod mpi;
pub mod neighbors;
#[cfg(test)]
mod tests;
pub mod threads;

/// Bytes of a message, at most.
pub const PIECE: usize = 4 << 20;

/// The time between two looks at the door while a rank waits for a message.
const LOOK: Duration = Duration::from_millis(200);

/// The way of messages to other ranks.
pub trait Door: Send + Sync {
    /// Sends a message; it does not wait for its arrival. Messages from one rank to another arrive in their order.
    ///
    /// # Errors
    /// Fails when the door is closed.
    fn send(&self, to: usize, message: Parcel) -> Result<()>;

    /// Ends the communication, after every rank has closed its door or a limit of time.
    fn close(&self);
}

/// A message between two ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parcel {
    /// A part of a value.
    Piece(Vec<u8>),
    /// The sender leaves the run early.
    Leave(Departure),
}

/// The reason for which a rank left the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departure {
    /// The rank.
    pub rank: usize,
    /// The error; `None` for a rank that was asked to stop.
    pub error: Option<String>,
}

impl Departure {
    /// The error of the other ranks.
    pub fn into_error(self) -> anyhow::Error {
        match self.error {
            None => Stopped.into(),
            Some(error) => Left { rank: self.rank, error }.into(),
        }
    }
}

/// A rank that left the run with an error ends all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The rank.
    pub rank: usize,
    /// Its error, as it would have printed it.
    pub error: String,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.error)
    }
}

impl std::error::Error for Left {}

/// A message and its sender.
pub type Arrival = (usize, Parcel);

/// The ranks of a run, as one of them sees them. Clones are the same rank.
#[derive(Clone, Default)]
pub struct Ranks {
    /// `None` for a run of a single process.
    connection: Option<Arc<Connection>>,
    neighbors: Neighbors,
}

/// The connection of a rank with the others.
struct Connection {
    rank: usize,
    size: usize,
    door: Box<dyn Door>,
    inbox: Mutex<Inbox>,
    sent: AtomicU64,
    waited_nanoseconds: AtomicU64,
}

/// The messages that have arrived.
struct Inbox {
    arrivals: Receiver<Arrival>,
    /// By sender, pieces that nobody has asked for yet.
    waiting: Vec<VecDeque<Vec<u8>>>,
    left: Option<Departure>,
}

impl Inbox {
    fn take(&mut self, (from, message): Arrival) {
        match message {
            Parcel::Piece(bytes) => self.waiting[from].push_back(bytes),
            Parcel::Leave(departure) => drop(self.left.get_or_insert(departure)),
        }
    }
}

/// The communication of a rank in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes sent to other ranks.
    pub bytes_sent: u64,
    /// Seconds in which the rank waited for messages.
    pub waited_seconds: f64,
}

impl Debug for Ranks {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.size())
    }
}

impl Ranks {
    /// A run of a single process.
    pub fn alone() -> Self {
        Self::default()
    }

    /// The rank `rank` of `size`, which sends through `door` and receives from `arrivals`.
    pub fn of(rank: usize, size: usize, door: Box<dyn Door>, arrivals: Receiver<Arrival>) -> Self {
        let waiting = vec![VecDeque::new(); size];
        let connection = Connection {
            rank,
            size,
            door,
            inbox: Mutex::new(Inbox { arrivals, waiting, left: None }),
            sent: AtomicU64::new(0),
            waited_nanoseconds: AtomicU64::new(0),
        };
        Self { connection: Some(Arc::new(connection)), neighbors: Neighbors::default() }
    }

    /// This rank as a process that works by itself beside the other ranks of its machine.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self { connection: None, neighbors: self.neighbors }
    }

    /// Asks all ranks for their machines.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn with_neighbors(self) -> Result<Self> {
        let places = self.all_gather_values(&RankPlace::here())?;
        Ok(Self { neighbors: Neighbors::among(&places, self.rank()), ..self })
    }

    /// The ranks of this machine.
    pub fn neighbors(&self) -> Neighbors {
        self.neighbors
    }

    /// The number of this rank, from 0 on.
    pub fn rank(&self) -> usize {
        self.connection.as_ref().map_or(0, |connection| connection.rank)
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.connection.as_ref().map_or(1, |connection| connection.size)
    }

    /// Returns whether this process is the whole run.
    pub fn is_alone(&self) -> bool {
        self.connection.is_none()
    }

    /// Returns whether this rank settles, prints and writes.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// The communication so far.
    pub fn traffic(&self) -> Traffic {
        let count = |of: fn(&Connection) -> &AtomicU64| {
            self.connection
                .as_deref()
                .map_or(0, |connection| of(connection).load(Ordering::Relaxed))
        };
        Traffic {
            bytes_sent: count(|connection| &connection.sent),
            waited_seconds: count(|connection| &connection.waited_nanoseconds) as f64 / 1e9,
        }
    }

    /// The bytes of every rank, in the order of the ranks.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let Some(connection) = &self.connection else {
            return Ok(vec![own.to_vec()]);
        };
        for to in connection.others() {
            connection.send(to, own)?;
        }
        let mut gathered = Vec::with_capacity(connection.size);
        for from in 0..connection.size {
            gathered.push(match from == connection.rank {
                true => own.to_vec(),
                false => connection.receive(from)?,
            });
        }
        Ok(gathered)
    }

    /// A value of every rank, in the order of the ranks.
    ///
    /// # Errors
    /// Fails when a rank has left, and for values that JSON cannot hold.
    pub fn all_gather_values<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        let gathered = self.all_gather(&serde_json::to_vec(own)?)?;
        gathered.iter().map(|bytes| Ok(serde_json::from_slice(bytes)?)).collect()
    }

    /// Sends a value to all other ranks, which call [`Ranks::hear_first`]. Only the first rank calls it.
    ///
    /// # Errors
    /// Fails when the door is closed, and for values that JSON cannot hold.
    pub fn tell_others<T: Serialize>(&self, value: &T) -> Result<()> {
        let Some(connection) = &self.connection else {
            return Ok(());
        };
        let bytes = serde_json::to_vec(value)?;
        connection.others().try_for_each(|to| connection.send(to, &bytes))
    }

    /// Waits for the value that the first rank tells. All other ranks call it.
    ///
    /// # Errors
    /// Fails when a rank has left, for a value of another type, and on a rank that is alone.
    pub fn hear_first<T: DeserializeOwned>(&self) -> Result<T> {
        let connection = self.connection.as_ref().context("a rank that is alone hears nothing")?;
        Ok(serde_json::from_slice(&connection.receive(0)?)?)
    }

    /// Sends bytes to another rank, which calls [`Ranks::receive`]. Values from one rank to another arrive in their order.
    ///
    /// # Errors
    /// Fails when the door is closed, and on a rank that is alone.
    pub fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        self.connection.as_ref().context("a rank that is alone sends nothing")?.send(to, bytes)
    }

    /// Waits for the next bytes that another rank sends to this rank.
    ///
    /// # Errors
    /// Fails when a rank has left, and on a rank that is alone.
    pub fn receive(&self, from: usize) -> Result<Vec<u8>> {
        self.connection.as_ref().context("a rank that is alone receives nothing")?.receive(from)
    }

    /// The next bytes from another rank, if all of them have arrived.
    ///
    /// # Errors
    /// Fails when a rank has left, and on a rank that is alone.
    pub fn try_receive(&self, from: usize) -> Result<Option<Vec<u8>>> {
        let connection = self.connection.as_ref();
        connection.context("a rank that is alone receives nothing")?.try_receive(from)
    }

    /// The value that `make` makes at the first rank. All ranks call it.
    ///
    /// # Errors
    /// Fails as `make`, and when a rank has left.
    pub fn decide<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !self.is_first() {
            return self.hear_first();
        }
        let value = make()?;
        self.tell_others(&value)?;
        Ok(value)
    }

    /// Sends a part to each rank and returns the parts from each rank. `part` makes the bytes for a rank; a rank's own part is not sent.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn exchange(&self, part: &dyn Fn(usize) -> Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let Some(connection) = &self.connection else {
            return Ok(vec![part(0)]);
        };
        for to in connection.others() {
            connection.send(to, &part(to))?;
        }
        let from = |from: usize| match from == connection.rank {
            true => Ok(part(from)),
            false => connection.receive(from),
        };
        (0..connection.size).map(from).collect()
    }

    /// Tells all ranks that this rank leaves the run early. They end as soon as they wait for a message.
    pub fn leave(&self, error: Option<String>) {
        if let Some(connection) = &self.connection {
            let departure = Departure { rank: connection.rank, error };
            for to in connection.others() {
                // A door that is closed has told it.
                let _ = connection.door.send(to, Parcel::Leave(departure.clone()));
            }
        }
    }

    /// Returns the departure of another rank that has left the run.
    pub fn departure(&self) -> Option<Departure> {
        let Some(connection) = &self.connection else {
            return None;
        };
        // A rank that waits for a message sees departures itself.
        let Ok(mut inbox) = connection.inbox.try_lock() else {
            return None;
        };
        while let Ok(arrival) = inbox.arrivals.try_recv() {
            inbox.take(arrival);
        }
        inbox.left.clone()
    }

    /// The outcome of this rank's work. Where another rank has left, its departure is the reason for the error of this rank.
    ///
    /// # Errors
    /// Fails as `done`, and with the error of a rank that has left.
    pub fn or_departure<T>(&self, done: Result<T>) -> Result<T> {
        match self.departure() {
            Some(departure) if done.is_err() => Err(departure.into_error()),
            _ => done,
        }
    }

    /// Ends the communication at the end of a run.
    pub fn close(&self) {
        if let Some(connection) = &self.connection {
            connection.door.close();
        }
    }
}

impl Connection {
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size).filter(move |to| *to != rank)
    }

    /// Sends the length of a value, and the value in pieces.
    fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        for piece in [&length[..]].into_iter().chain(bytes.chunks(PIECE)) {
            self.sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
            self.door.send(to, Parcel::Piece(piece.to_vec()))?;
        }
        Ok(())
    }

    /// Receives a value that [`Connection::send`] has sent.
    fn receive(&self, from: usize) -> Result<Vec<u8>> {
        let start = Instant::now();
        let mut inbox = self.inbox();
        let length = inbox.piece(from)?;
        let length = <[u8; 8]>::try_from(&length[..]).map_err(|_| disagreement(from))?;
        let length = usize::try_from(u64::from_le_bytes(length))?;
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            bytes.append(&mut inbox.piece(from)?);
        }
        ensure!(bytes.len() == length, disagreement(from));
        let waited = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_nanoseconds.fetch_add(waited, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Receives a value whose pieces have all arrived.
    fn try_receive(&self, from: usize) -> Result<Option<Vec<u8>>> {
        let mut inbox = self.inbox();
        while let Ok(arrival) = inbox.arrivals.try_recv() {
            inbox.take(arrival);
        }
        let waiting = &inbox.waiting[from];
        let length = waiting.front().and_then(|piece| <[u8; 8]>::try_from(&piece[..]).ok());
        let bytes: usize = waiting.iter().skip(1).map(Vec::len).sum();
        let has_arrived = length.is_some_and(|of| bytes as u64 >= u64::from_le_bytes(of));
        if !has_arrived && let Some(departure) = &inbox.left {
            return Err(departure.clone().into_error());
        }
        drop(inbox);
        match has_arrived {
            true => self.receive(from).map(Some),
            false => Ok(None),
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbox {
    /// Waits for the next piece from a rank.
    fn piece(&mut self, from: usize) -> Result<Vec<u8>> {
        loop {
            if let Some(piece) = self.waiting[from].pop_front() {
                return Ok(piece);
            }
            if let Some(departure) = &self.left {
                return Err(departure.clone().into_error());
            }
            match self.arrivals.recv_timeout(LOOK) {
                Ok(arrival) => self.take(arrival),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("the connection to the other ranks has ended").into());
                }
            }
        }
    }
}

/// A message of a length that this rank does not expect: the ranks execute different commands.
fn disagreement(rank: usize) -> Failure {
    Failure::new(format!("rank {rank} sent a message that does not belong here"))
        .detail("all ranks must run the same version of prune with the same flags")
        .hint("start every rank with the same command: mpirun -n 4 prune …")
}
