//! The connection of a rank with the others: values in pieces, out through the door, and in from the messages that have arrived.

use std::collections::VecDeque;
use std::fmt::{self, Formatter};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::run::Stopped;

/// Bytes of a message, at most.
pub const PIECE: usize = 4 << 20;

/// The way of messages to other ranks.
pub trait Door: Send + Sync {
    /// Sends a message; it does not wait for its arrival. Messages of a lane from one rank to another arrive in their order.
    ///
    /// # Errors
    /// Fails when the door is closed.
    fn send(&self, to: usize, lane: Lane, message: Parcel) -> Result<()>;

    /// Ends the communication, after every rank has closed its door or a limit of time.
    fn close(&self);
}

/// The messages of a thread: two threads of a rank wait for messages at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// The thread that computes.
    Work,
    /// The thread that reads weights ahead.
    Weights,
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

/// The time between two looks at the door while a rank waits for a message.
const LOOK: Duration = Duration::from_millis(200);

/// The connection of a rank with the others.
pub(super) struct Connection {
    pub(super) rank: usize,
    pub(super) size: usize,
    door: Arc<dyn Door>,
    lane: Lane,
    inbox: Mutex<Inbox>,
    pub(super) sent: AtomicU64,
    pub(super) waited_nanoseconds: AtomicU64,
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

impl Connection {
    pub(super) fn new(
        (rank, size): (usize, usize),
        door: Arc<dyn Door>,
        lane: Lane,
        arrivals: Receiver<Arrival>,
    ) -> Self {
        let waiting = vec![VecDeque::new(); size];
        Self {
            rank,
            size,
            door,
            lane,
            inbox: Mutex::new(Inbox { arrivals, waiting, left: None }),
            sent: AtomicU64::new(0),
            waited_nanoseconds: AtomicU64::new(0),
        }
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size).filter(move |to| *to != rank)
    }

    /// Sends the length of a value, and the value in pieces.
    pub(super) fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        for piece in [&length[..]].into_iter().chain(bytes.chunks(PIECE)) {
            self.sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
            self.door.send(to, self.lane, Parcel::Piece(piece.to_vec()))?;
        }
        Ok(())
    }

    /// Receives a value that [`Connection::send`] has sent.
    pub(super) fn receive(&self, from: usize) -> Result<Vec<u8>> {
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
    pub(super) fn try_receive(&self, from: usize) -> Result<Option<Vec<u8>>> {
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

    /// Tells all ranks that this rank leaves the run early.
    pub(super) fn leave(&self, departure: &Departure) {
        for to in self.others() {
            // A door that is closed has told it.
            let _ = self.door.send(to, self.lane, Parcel::Leave(departure.clone()));
        }
    }

    /// Ends the waits of this rank, too.
    pub(super) fn end_waits(&self, departure: Departure) {
        // A thread that waits holds the inbox, and looks for its own departure there.
        let _ = self.door.send(self.rank, self.lane, Parcel::Leave(departure));
    }

    /// Returns the departure of another rank, as far as no thread waits for messages: that thread sees departures itself.
    pub(super) fn departure(&self) -> Option<Departure> {
        let mut inbox = self.inbox.try_lock().ok()?;
        while let Ok(arrival) = inbox.arrivals.try_recv() {
            inbox.take(arrival);
        }
        inbox.left.clone()
    }

    pub(super) fn close(&self) {
        self.door.close();
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
