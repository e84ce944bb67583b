//! Slots while copies in progress hold the pages of L1.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use larder_kernels::{Device, Direction, HostDevice};
use larder_tiers::PrefixCache;
use larder_tiers::prefix::{L1Memory, SequenceError};

use super::honest::eventually;
use super::rules::{is_empty, options, prompt};
use super::{PATIENCE, toy};

/// A full cache of four pages: two of them are held by a copy to L2 that goes on when the device is
/// stepped.
fn full(device: &Arc<HostDevice>) -> PrefixCache {
    let l1 = device.alloc_l1(&toy().model().shape(), 5).unwrap();
    let options = options(4, 20).with(|o| {
        o.polls_itself = false;
        o.l1 = Some(L1Memory::Pool(device.clone(), l1));
    });
    let cache = options.over(None).unwrap();
    let tokens = prompt(2);
    let mut sequence = cache.begin(&tokens).unwrap();
    sequence.computed(tokens.len()).unwrap();
    sequence.share().unwrap();
    cache
}

#[test]
fn a_push_waits_for_copies_as_long_as_the_caller_says() {
    let device = Arc::new(HostDevice::stepped(Box::new(|_| Ok(()))));
    let cache = full(&device);
    let tokens: Vec<u64> = prompt(2).iter().map(|token| token ^ 1).collect();
    let mut sequence = cache.begin(&tokens[1..]).unwrap();
    // The device is not stepped yet, so a push that waited would not end.
    let Err(SequenceError::NoRoom(no_room)) = sequence.push(1) else {
        panic!("pages under a copy are used");
    };
    assert_eq!((no_room.short, no_room.pending), (1, 2));
    assert_eq!(sequence.len(), tokens.len() - 1);
    thread::scope(|scope| {
        let pushed = scope.spawn(|| sequence.push_within(1, PATIENCE));
        let begun = Instant::now();
        while !pushed.is_finished() && begun.elapsed() < PATIENCE {
            let _is_copied = device.step(Direction::Store);
            thread::yield_now();
        }
        assert_eq!(pushed.join().unwrap(), Ok(()));
    });
    assert_eq!(sequence.len(), tokens.len());
    drop(sequence);
    eventually("nothing is in flight", || {
        while device.step(Direction::Store) {}
        cache.poll().unwrap();
        cache.is_settled().unwrap()
    });
    is_empty(&cache);
}
