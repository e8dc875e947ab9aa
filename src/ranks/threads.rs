//! Ranks that are threads of a single process: they share its worker threads and no memory of a run. For tests of what ranks compute.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use anyhow::{Context, Result};

use super::{Arrival, Door, Lane, Parcel, Ranks};

/// A door whose messages arrive at once.
struct ChannelDoor {
    rank: usize,
    /// By lane and rank.
    to: [Vec<Sender<Arrival>>; 2],
}

impl Door for ChannelDoor {
    fn send(&self, to: usize, lane: Lane, message: Parcel) -> Result<()> {
        self.to[lane as usize][to].send((self.rank, message)).context("the other rank has ended")
    }

    fn close(&self) {}
}

/// The ranks of a run of this size.
pub fn group(size: usize) -> Vec<Ranks> {
    if size == 1 {
        return vec![Ranks::alone()];
    }
    let channels = || (0..size).map(|_| channel()).unzip();
    let (to_work, of_work): (Vec<Sender<Arrival>>, Vec<Receiver<Arrival>>) = channels();
    let (to_weights, of_weights): (Vec<Sender<Arrival>>, Vec<Receiver<Arrival>>) = channels();
    let to = [to_work, to_weights];
    let ranks = of_work.into_iter().zip(of_weights).enumerate();
    ranks
        .map(|(rank, (work, weights))| {
            let door = ChannelDoor { rank, to: to.clone() };
            Ranks::of(rank, size, Arc::new(door), [work, weights])
        })
        .collect()
}

/// Runs `work` at every rank, and returns the outcomes in the order of the ranks.
pub fn run<T: Send>(size: usize, work: impl Fn(&Ranks) -> Result<T> + Sync) -> Vec<Result<T>> {
    let (work, ranks) = (&work, group(size));
    thread::scope(|scope| {
        let started: Vec<_> = ranks.iter().map(|ranks| scope.spawn(move || work(ranks))).collect();
        let joined = started.into_iter().map(|rank| rank.join());
        joined.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
