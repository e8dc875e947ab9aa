//! The record of a rank of a run over several processes.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// The time, memory and communication of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Its number, from 0 on.
    pub rank: usize,
    /// The name of its machine.
    pub host: String,
    /// Worker threads.
    pub threads: usize,
    /// Seconds from its start to the end of its sweep.
    pub seconds: f64,
    /// The largest peak of a phase; absent on systems that do not report memory.
    pub peak_anonymous: Option<ByteSize>,
    /// Bytes sent to other ranks.
    pub bytes_sent: u64,
    /// Seconds in which it waited for messages of other ranks.
    pub waited_seconds: f64,
}
