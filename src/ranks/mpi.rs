//! The door to MPI: one thread makes every call, sends what the ranks give it, and receives whatever arrives.
//!
//! The thread never waits inside MPI for another rank: it sends without blocking, looks for messages, and sleeps between two looks, so it
//! leaves the processors to the work. It receives at any time, so a message never waits for a rank that computes. Every [`BEAT`] it
//! tells all ranks that it lives. A rank that is silent for [`SILENCE`] ends the job. Time in which this thread itself was suspended, with
//! the whole job perhaps, does not count.
//!
//! | call | use |
//! | --- | --- |
//! | init with threads, rank, size | start |
//! | send without blocking, test | messages out |
//! | look for a message, receive it | messages in |
//! | abort | a silent rank |
//! | finalize | end, after a farewell to and from all ranks |

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ferrompi::{Communicator, Mpi, Source, Tag, ThreadLevel};

use super::{Arrival, Door, Lane, Parcel, Ranks};
use crate::failure::Failure;

/// The time between two signs of life.
const BEAT: Duration = Duration::from_secs(5);
/// The silence of a rank that ends the job.
const SILENCE: Duration = Duration::from_secs(60);
/// The time between two looks that only a suspended thread has.
const SUSPENDED: Duration = Duration::from_secs(20);
/// The time in which all ranks have to end after the first of them has ended.
const FAREWELL: Duration = Duration::from_secs(30);
/// Looks without a message before the thread sleeps between them.
const LOOKS: u32 = 200;
/// The time that the thread sleeps after [`LOOKS`], and the longest sleep.
const SLEEPS: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(500)];

/// The kinds of messages, as tags; by [`Lane`] where a rank has asked for them.
const PIECES: [i32; 2] = [1, 5];
const LEAVES: [i32; 2] = [2, 6];
const ALIVE: i32 = 3;
const BYE: i32 = 4;

/// A message on its way out.
struct Outgoing {
    to: usize,
    tag: i32,
    bytes: Vec<u8>,
}

/// Orders for the thread.
enum Order {
    Send(Outgoing),
    Close,
}

/// The way to the thread that calls MPI.
struct MpiDoor {
    orders: Mutex<Sender<Order>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Door for MpiDoor {
    fn send(&self, to: usize, lane: Lane, message: Parcel) -> Result<()> {
        let (tag, bytes) = match message {
            Parcel::Piece(bytes) => (PIECES[lane as usize], bytes),
            Parcel::Leave(departure) => (LEAVES[lane as usize], serde_json::to_vec(&departure)?),
        };
        self.order(Order::Send(Outgoing { to, tag, bytes }))
    }

    fn close(&self) {
        // A thread that has ended needs no order.
        let _ = self.order(Order::Close);
        let thread = self.thread.lock().map(|mut thread| thread.take());
        if let Ok(Some(thread)) = thread {
            // It ends within its limit of time.
            let _ = thread.join();
        }
    }
}

impl MpiDoor {
    fn order(&self, order: Order) -> Result<()> {
        let orders = self.orders.lock().map_err(|_| anyhow!("a thread has failed"))?;
        orders.send(order).context("the connection to the other ranks has ended")
    }
}

/// Starts MPI and returns this process's rank.
///
/// # Arguments
/// * `tell`: prints the last words of a job that this thread ends
///
/// # Errors
/// Fails when MPI cannot be started.
pub(super) fn start(tell: fn(&str)) -> Result<Ranks> {
    let (orders, ordered) = channel();
    let (to_work, of_work) = channel();
    let (to_weights, of_weights) = channel();
    let (place, placed) = channel();
    let serve = move || {
        let mpi = match Mpi::init_thread(ThreadLevel::Funneled) {
            Ok(mpi) => mpi,
            Err(error) => return drop(place.send(Err(error))),
        };
        let world = mpi.world();
        let size = world.size();
        if place.send(Ok((world.rank(), size))).is_err() {
            return;
        }
        let mut service = Service::new(&world, [to_work, to_weights], tell);
        if let Err(error) = service.run(&ordered) {
            // Other ranks would wait for this rank.
            tell(&format!("error: MPI: {error}"));
            service.world.abort(1);
        }
    };
    let thread = thread::Builder::new().name("mpi".to_string()).spawn(serve);
    let thread = thread.context("starting the thread of MPI")?;
    let (rank, size) = placed.recv().context("the thread of MPI has ended")?.map_err(|error| {
        Failure::new(format!("MPI cannot be started: {error}"))
            .hint("start prune with the mpirun or srun of the MPI that it was built with")
    })?;
    let door = MpiDoor { orders: Mutex::new(orders), thread: Mutex::new(Some(thread)) };
    Ok(Ranks::of(rank as usize, size as usize, Arc::new(door), [of_work, of_weights]))
}

/// The state of the thread.
struct Service<'w> {
    world: &'w Communicator,
    /// By lane.
    arrived: [Sender<Arrival>; 2],
    tell: fn(&str),
    /// By rank, the time of its last message, and whether it has said farewell.
    heard: Vec<Instant>,
    gone: Vec<bool>,
    last_beat: Instant,
    last_look: Instant,
    /// The time of this rank's farewell.
    closed: Option<Instant>,
}

impl<'w> Service<'w> {
    fn new(world: &'w Communicator, arrived: [Sender<Arrival>; 2], tell: fn(&str)) -> Self {
        let (now, size) = (Instant::now(), world.size() as usize);
        Self {
            world,
            arrived,
            tell,
            heard: vec![now; size],
            gone: vec![false; size],
            last_beat: now,
            last_look: now,
            closed: None,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.world.rank() as usize;
        (0..self.gone.len()).filter(move |rank| *rank != own)
    }

    /// Serves until all ranks have said farewell.
    fn run(&mut self, ordered: &Receiver<Order>) -> ferrompi::Result<()> {
        let mut looks = 0;
        loop {
            let out = self.outgoing(ordered);
            let has_sent = !out.is_empty();
            self.send(&out)?;
            let has_received = self.receive_all()?;
            if let Some(closed) = self.closed
                && (self.others().all(|rank| self.gone[rank]) || closed.elapsed() > FAREWELL)
            {
                return Ok(());
            }
            self.check_silence();
            looks = if has_sent || has_received { 0 } else { looks + 1 };
            rest(looks);
        }
    }

    /// The messages that wait for this thread, its own signs of life and farewells included.
    fn outgoing(&mut self, ordered: &Receiver<Order>) -> Vec<Outgoing> {
        let mut out = Vec::new();
        let others: Vec<usize> = self.others().collect();
        let to_all = |tag: i32, out: &mut Vec<Outgoing>| {
            out.extend(others.iter().map(|&to| Outgoing { to, tag, bytes: vec![0] }));
        };
        if self.closed.is_none() {
            loop {
                match ordered.try_recv() {
                    Ok(Order::Send(message)) => out.push(message),
                    Err(TryRecvError::Empty) => break,
                    // A rank that drops its door has ended.
                    Ok(Order::Close) | Err(TryRecvError::Disconnected) => {
                        to_all(BYE, &mut out);
                        self.closed = Some(Instant::now());
                        break;
                    }
                }
            }
        }
        if self.last_beat.elapsed() > BEAT {
            self.last_beat = Instant::now();
            to_all(ALIVE, &mut out);
        }
        out
    }

    /// Sends messages, and receives while they are on their way.
    fn send(&mut self, out: &[Outgoing]) -> ferrompi::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let world = self.world;
        ferrompi::scope(|scope| {
            let mut pending = Vec::with_capacity(out.len());
            for Outgoing { to, tag, bytes } in out {
                pending.push(world.isend(scope, &bytes[..], *to as i32, *tag)?);
            }
            let mut looks = 0;
            while !pending.is_empty() {
                let mut index = 0;
                let before = pending.len();
                while index < pending.len() {
                    match pending[index].test()? {
                        Some(_) => drop(pending.swap_remove(index)),
                        None => index += 1,
                    }
                }
                let has_received = self.receive_all()?;
                self.check_silence();
                looks = if has_received || pending.len() < before { 0 } else { looks + 1 };
                rest(looks);
            }
            Ok(())
        })
    }

    /// Receives the messages that have arrived.
    fn receive_all(&mut self) -> ferrompi::Result<bool> {
        let mut has_received = false;
        while let Some(status) = self.world.iprobe::<u8>(Source::Any, Tag::Any)? {
            let mut bytes = vec![0u8; status.count.unwrap_or(0)];
            self.world.recv(&mut bytes, status.source, status.tag)?;
            has_received = true;
            let (Source::Rank(from), Tag::Value(tag)) = (status.source, status.tag) else {
                continue;
            };
            let from = from as usize;
            self.heard[from] = Instant::now();
            if tag == BYE {
                self.gone[from] = true;
            }
            for lane in [Lane::Work, Lane::Weights] {
                let message = if tag == PIECES[lane as usize] {
                    Parcel::Piece(std::mem::take(&mut bytes))
                } else if tag == LEAVES[lane as usize]
                    && let Ok(departure) = serde_json::from_slice(&bytes)
                {
                    Parcel::Leave(departure)
                } else {
                    continue;
                };
                // A rank that has ended takes no messages.
                let _ = self.arrived[lane as usize].send((from, message));
            }
        }
        Ok(has_received)
    }

    /// Ends the job where a rank has been silent for too long.
    fn check_silence(&mut self) {
        let now = Instant::now();
        if now.duration_since(std::mem::replace(&mut self.last_look, now)) > SUSPENDED {
            self.heard.fill(now);
        }
        let silent =
            self.others().find(|&rank| !self.gone[rank] && self.heard[rank].elapsed() > SILENCE);
        if let Some(rank) = silent {
            let seconds = SILENCE.as_secs();
            (self.tell)(&format!(
                "error: rank {rank} has not been heard of for {seconds} s: the job ends; the same command continues it"
            ));
            self.world.abort(1);
        }
    }
}

/// Sleeps between two looks that found nothing.
fn rest(looks: u32) {
    match looks {
        0 => {}
        1..LOOKS => thread::yield_now(),
        _ if looks < 2 * LOOKS => thread::sleep(SLEEPS[0]),
        _ => thread::sleep(SLEEPS[1]),
    }
}
