//! Messages between ranks that are threads of this process.

use super::*;
use crate::run::Stopped;

#[test]
fn values_of_all_ranks_arrive_in_their_order() {
    for size in 1..5 {
        let gathered = threads::run(size, |ranks| {
            // Longer than a piece, with a length of its own at each rank.
            let own = vec![ranks.rank() as u8; PIECE * ranks.rank() + 3];
            let bytes = ranks.all_gather(&own)?;
            let lengths: Vec<usize> = bytes.iter().map(Vec::len).collect();
            let parts = ranks.exchange(&|to| vec![ranks.rank() as u8, to as u8])?;
            let first = "from the first".to_string();
            let heard = match ranks.is_first() {
                true => ranks.tell_others(&first).map(|()| first)?,
                false => ranks.hear_first()?,
            };
            Ok((lengths, parts, heard))
        });
        for (rank, outcome) in gathered.into_iter().enumerate() {
            let (lengths, parts, first) = outcome.unwrap();
            assert_eq!(lengths, (0..size).map(|of| PIECE * of + 3).collect::<Vec<_>>());
            let expected: Vec<_> = (0..size).map(|from| vec![from as u8, rank as u8]).collect();
            assert_eq!(parts, expected);
            assert_eq!(first, "from the first");
        }
    }
}

#[test]
fn a_rank_that_leaves_ends_the_wait_of_all() {
    let ended = threads::run(3, |ranks| {
        if ranks.rank() == 1 {
            ranks.leave(Some("no memory".to_string()));
            return Ok(());
        }
        ranks.all_gather(b"mine").map(drop)
    });
    for rank in [0, 2] {
        let error = ended[rank].as_ref().unwrap_err();
        assert_eq!(error.to_string(), "rank 1: no memory");
    }
    let stopped = threads::run(2, |ranks| {
        if ranks.rank() == 0 {
            ranks.leave(None);
            return Ok(());
        }
        ranks.all_gather(b"mine").map(drop)
    });
    assert!(stopped[1].as_ref().unwrap_err().is::<Stopped>());
}

#[test]
fn traffic_counts_what_is_sent() {
    let traffic = threads::run(3, |ranks| {
        ranks.all_gather(&[7; 100])?;
        Ok(ranks.traffic().bytes_sent)
    });
    for bytes in traffic {
        // Two other ranks, each with a length of eight bytes.
        assert_eq!(bytes.unwrap(), 2 * 108);
    }
    assert_eq!(Ranks::alone().traffic(), Traffic::default());
}
