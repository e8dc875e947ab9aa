//! The ranks of a run: processes on one or several machines that share its samples and windows.
//!
//! All ranks execute the same commands in the same order. They send bytes and add numbers themselves, in the order of samples and blocks,
//! so results have the bits of a single process. No floating-point reduction of MPI is used.
//!
//! | file | content |
//! | --- | --- |
//! | `arrays` | arrays that all ranks hold: parts that are put together, integers that are added up |
//! | `connection` | values in pieces, out through the door and in from it |
//! | `launcher` | the environment of a launcher: the number of processes it has started |
//! | `mpi` | the door to MPI: the only file that calls it (feature `mpi`) |
//! | `neighbors` | the ranks of a machine: its threads and memory are divided among them |
//! | `threads` | ranks that are threads of a single process, for tests |
//!
//! A message is at most [`PIECE`] bytes long, so memory and waiting stay bounded. A wait ends with an error as soon as a rank has left the
//! run.

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use connection::Connection;
pub use connection::{Arrival, Departure, Door, Lane, Left, PIECE, Parcel};
use neighbors::{Neighbors, RankPlace};

pub mod arrays;
mod connection;
pub mod launcher;
#[cfg(feature = "mpi")]
mod mpi;
pub mod neighbors;
#[cfg(test)]
mod tests;
pub mod threads;

/// The ranks of a run, as one of them sees them. Clones are the same rank.
#[derive(Clone, Default)]
pub struct Ranks {
    /// `None` for a run of a single process.
    connection: Option<Arc<Connection>>,
    /// The connection of the thread that reads weights.
    weights: Option<Arc<Connection>>,
    neighbors: Neighbors,
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

    /// The rank `rank` of `size`, which sends through `door` and receives from `arrivals`, by lane.
    pub fn of(
        rank: usize,
        size: usize,
        door: Arc<dyn Door>,
        arrivals: [Receiver<Arrival>; 2],
    ) -> Self {
        let [of_work, of_weights] = arrivals;
        let connection = |lane, arrivals| {
            Some(Arc::new(Connection::new((rank, size), Arc::clone(&door), lane, arrivals)))
        };
        Self {
            connection: connection(Lane::Work, of_work),
            weights: connection(Lane::Weights, of_weights),
            neighbors: Neighbors::default(),
        }
    }

    /// This rank for the thread that reads weights.
    #[must_use]
    pub fn for_weights(&self) -> Self {
        Self { connection: self.weights.clone(), weights: None, neighbors: self.neighbors }
    }

    /// This rank as a process that works by itself beside the other ranks of its machine.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self { connection: None, weights: None, neighbors: self.neighbors }
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
        let bytes = |connection: &Arc<Connection>| connection.sent.load(Ordering::Relaxed);
        let waited = self
            .connection
            .as_deref()
            .map_or(0, |connection| connection.waited_nanoseconds.load(Ordering::Relaxed));
        Traffic {
            bytes_sent: self.connection.iter().chain(&self.weights).map(bytes).sum(),
            waited_seconds: waited as f64 / 1e9,
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
        let departure = Departure { rank: self.rank(), error };
        for connection in self.connection.iter().chain(&self.weights) {
            connection.leave(&departure);
        }
        // The thread of this rank that reads weights ends, too.
        if let Some(weights) = &self.weights {
            weights.end_waits(departure);
        }
    }

    /// Returns the departure of another rank that has left the run.
    pub fn departure(&self) -> Option<Departure> {
        self.connection.as_ref()?.departure()
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
            connection.close();
        }
    }
}
