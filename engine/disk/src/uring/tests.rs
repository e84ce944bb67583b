//! The thread of a ring beside a slow read.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use larder_base::memory::AlignedBuf;

use super::*;
use crate::honest::skipped;
use crate::mailbox::Mailbox;
use crate::{Action, Buffer, Pacing, Purpose};

#[test]
fn the_thread_of_a_ring_renews_the_claim_of_a_slow_read() {
    let Some(features) = Features::probe().ok().filter(|known| known.timed_waits) else {
        return skipped("a slow read", "there is no io_uring with timed waits");
    };
    // A read of a pipe takes until there is something in it.
    let (reader, mut writer) = io::pipe().unwrap();
    let pacing = Arc::new(Pacing::create());
    let options = DiskOptions {
        files: vec![Some(Arc::new(OwnedFd::from(reader)))],
        depth: 1,
        latencies: Arc::default(),
        pacing: pacing.clone(),
        board: Arc::default(),
    };
    let disk = Uring::open(options, features).unwrap();
    let answers = Arc::new(Mailbox::default());
    let read = Op {
        volume: 0,
        action: Action::Read {
            offset: 0,
            buffer: Buffer::Owned(AlignedBuf::zeroed(4096).unwrap()),
        },
        purpose: Purpose::Call,
        deadline: None,
        tag: 0,
        sink: answers.clone(),
    };
    // SAFETY: the memory travels with the operation.
    unsafe { disk.submit(vec![read]) };
    let is_renewed = pacing.is_renewed(0);
    writer.write_all(&[1; 4096]).unwrap();
    let mut answers = answers.take(Duration::from_secs(60));
    let answer = answers.pop_front().map(|done| done.result);
    assert_eq!(answer, Some(Ok(())));
    assert!(is_renewed);
}
