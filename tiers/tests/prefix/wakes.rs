//! Futures of many waiting requests: which of them a signal wakes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use larder_tiers::prefix::Waiting;
use larder_tiers::{Ask, PrefixCache, Sequence};

use super::engine::PAGE;
use super::rules::{is_empty, options};

const WAITING: usize = 500;

#[derive(Default)]
struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Asked {
    waiting: Pin<Box<Waiting>>,
    wakes: Arc<Counter>,
}

impl Asked {
    fn new(cache: &PrefixCache, first: u64, pages: usize) -> Asked {
        let tokens: Vec<u64> = (0..(pages * PAGE) as u64).map(|at| at + first).collect();
        let waiting = Box::pin(cache.ask(&Ask::new(&tokens)).unwrap());
        // Its lookup in L3 is over: there is none.
        cache.poll().unwrap();
        Asked {
            waiting,
            wakes: Arc::default(),
        }
    }

    fn poll(&mut self) -> Option<Sequence> {
        let waker = Waker::from(self.wakes.clone());
        match self.waiting.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(sequence) => Some(sequence.unwrap()),
            Poll::Pending => None,
        }
    }

    fn wakes(&self) -> usize {
        self.wakes.0.load(Ordering::Relaxed)
    }
}

fn total(futures: &[Asked]) -> usize {
    futures.iter().map(Asked::wakes).sum()
}

#[test]
fn room_for_one_of_500_waiting_requests_wakes_one_of_them() {
    let options = options(8, 8).with(|o| o.polls_itself = false);
    let cache = options.over(None).unwrap();
    let mut running: Vec<Sequence> = (0..4)
        .map(|at| Asked::new(&cache, at * 10_000, 2).poll().unwrap())
        .collect();
    let ask = |at: usize| Asked::new(&cache, 100_000 + 1000 * at as u64, 2);
    let mut futures: Vec<Asked> = (0..WAITING).map(ask).collect();
    assert!(futures.iter_mut().all(|future| future.poll().is_none()));
    assert_eq!(total(&futures), 0);
    for turn in 0..100 {
        drop(running.remove(0));
        assert_eq!(total(&futures), turn + 1);
        // The first that waits is the first that is woken.
        assert_eq!(futures[turn].wakes(), 1);
        running.push(futures[turn].poll().unwrap());
    }
    // Two sequences end, and one request of the room of both is before the others.
    let mut long = Asked::new(&cache, 900_000, 4);
    assert!(long.poll().is_none());
    drop(futures.split_off(100));
    let mut late = ask(WAITING);
    assert!(late.poll().is_none());
    drop(running.remove(0));
    assert_eq!((long.wakes(), late.wakes()), (0, 1));
    drop(late);
    drop(running.remove(0));
    assert_eq!(long.wakes(), 1);
    running.push(long.poll().unwrap());
    drop((running, futures, long));
    is_empty(&cache);
}
