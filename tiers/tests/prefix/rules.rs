//! The rules of the interface, one by one.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use larder_engine::format::Namespace;
use larder_engine::{CreateOptions, OpenOptions, Store};
use larder_kernels::{ChunkAt, Device, DeviceError, HostDevice, KvCounts, KvShape, Layout, Ticket};
use larder_tiers::config::WritePolicy;
use larder_tiers::core::Broken;
use larder_tiers::l3::{L3, StoreL3};
use larder_tiers::model::{Stripe, page_shape};
use larder_tiers::prefix::{
    Begin, BeginError, CloseError, L1Memory, OpenError, Replaced, RowError, SequenceError,
};
use larder_tiers::{Ask, CacheError, Model, PrefixCache, PrefixOptions};

use super::engine::{PAGE, Rows, WORDS};
use super::honest::eventually;
use super::memory::Memory;
use super::{PATIENCE, answer, put_of, serve, toy};

pub fn options(l1_pages: u32, l2_pages: u32) -> PrefixOptions {
    PrefixOptions::new(&toy().model(), l1_pages, l2_pages)
}

fn over(l3: &Arc<Memory>) -> PrefixCache {
    options(20, 40).over(Some(l3.clone())).unwrap()
}

/// An L3 with the pages of a prompt.
pub fn filled(pages: usize) -> Arc<Memory> {
    let l3 = Arc::<Memory>::default();
    let cache = over(&l3);
    serve(&cache, &toy(), &prompt(pages));
    cache.close().unwrap();
    l3
}

pub fn prompt(pages: usize) -> Vec<u64> {
    let tokens = 0..(pages * PAGE + 1) as u64;
    tokens.map(|token| token * 7 % WORDS).collect()
}

/// All pages are free after a reset.
pub fn is_empty(cache: &PrefixCache) {
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    cache.audit([]).unwrap();
    cache.reset().unwrap();
    let counts = cache.with_core(|core| {
        let all = (core.config().l1_pages, core.config().l2_pages);
        (core.free_pages(), all, core.prefetches_out())
    });
    let (free, all, prefetches) = counts.unwrap();
    assert_eq!((free, prefetches), (all, 0));
}

#[test]
fn tokens_come_from_the_tier_that_has_them() {
    let l3 = Arc::<Memory>::default();
    let cache = over(&l3);
    // Two nodes of three pages each.
    serve(&cache, &toy(), &prompt(3));
    let of = |cache: &PrefixCache| {
        let cached = serve(cache, &toy(), &prompt(6));
        [cached.l1, cached.l2, cached.l3]
    };
    let all = 6 * PAGE;
    assert_eq!(of(&cache), [3 * PAGE, 0, 0]);
    assert_eq!(of(&cache), [all, 0, 0]);
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    cache.evict(3).unwrap();
    assert_eq!(of(&cache), [3 * PAGE, 3 * PAGE, 0]);
    cache.close().unwrap();
    assert_eq!(of(&over(&l3)), [0, 0, all]);
}

#[test]
fn dropped_requests_and_sequences_leave_nothing() {
    let l3 = filled(8);
    let cache = over(&l3);
    l3.is_stuck.store(true, Ordering::Release);
    // Their prefetches have no answer. Five of them would take all of the share.
    for _ in 0..10 {
        drop(cache.ask(&Ask::new(&prompt(8))).unwrap());
    }
    l3.is_stuck.store(false, Ordering::Release);
    let all = prompt(8);
    let mut sequence = cache.begin(&all).unwrap();
    assert!(sequence.cached().l3 > 0, "{:?}", cache.stats());
    answer(&toy(), &mut sequence, &all);
    drop(sequence);
    is_empty(&cache);
}

#[test]
fn a_request_waits_for_room_until_a_sequence_ends() {
    let cache = options(10, 10).over(None).unwrap();
    let running = cache.begin(&prompt(8)).unwrap();
    let wait = Duration::from_millis(1);
    let other: Vec<u64> = prompt(5).into_iter().rev().collect();
    let refused = cache.ask(&Ask::new(&other)).unwrap().begin_within(wait);
    assert!(matches!(
        refused,
        Err(BeginError::NoRoom {
            pages: 6,
            available: 1
        })
    ));
    let asked = cache.ask(&Ask::new(&other)).unwrap();
    thread::scope(|scope| {
        let begun = scope.spawn(|| asked.begin_within(PATIENCE));
        drop(running);
        assert_eq!(begun.join().unwrap().unwrap().len(), other.len());
    });
    let long = prompt(10);
    let ask = |tokens: &[u64], reserved| cache.ask(&Ask::new(tokens).reserved(reserved)).err();
    assert!(matches!(
        ask(&long, 0),
        Some(BeginError::TooLong {
            pages: 11,
            l1_pages: 10
        })
    ));
    assert!(matches!(
        ask(&long[..10], 151),
        Some(BeginError::TooLong { .. })
    ));
    assert!(matches!(ask(&[], 0), Some(BeginError::Empty)));
    is_empty(&cache);
}

#[test]
fn attempts_without_room_are_not_counted_as_requests() {
    let cache = options(10, 10).over(None).unwrap();
    let all = prompt(8);
    let mut running = cache.begin(&all).unwrap();
    running.computed(3 * PAGE).unwrap();
    running.share().unwrap();
    let mut asked = cache.ask(&Ask::new(&all)).unwrap();
    let counts = || cache.with_core(|core| (core.stats().requested, core.stats().l1_hits));
    assert_eq!(counts().unwrap(), (8, 0));
    for _ in 0..10 {
        asked = match asked.try_begin().unwrap() {
            Begin::Later(asked) => asked,
            Begin::Ready(_) => panic!("there is no room"),
        };
    }
    assert_eq!(counts().unwrap(), (8, 0));
    drop(running);
    let begun = asked.begin_within(PATIENCE).unwrap();
    assert_eq!((begun.cached().l1, counts().unwrap()), (3 * PAGE, (16, 3)));
}

#[test]
fn a_push_without_room_changes_nothing() {
    let cache = options(4, 4).over(None).unwrap();
    let mut first = cache.begin(&prompt(2)).unwrap();
    let tokens: Vec<u64> = (0..PAGE as u64).collect();
    let second = cache.begin(&tokens).unwrap();
    for token in 0..PAGE as u64 - 1 {
        first.push(token).unwrap();
    }
    let refused = first.push(1);
    assert!(
        matches!(refused, Err(SequenceError::NoRoom(_))),
        "{refused:?}"
    );
    assert_eq!(first.len(), 3 * PAGE);
    cache.audit([&first, &second]).unwrap();
    drop(second);
    first.push(1).unwrap();
    drop(first);
    is_empty(&cache);
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_request_is_a_future_that_is_woken() {
    let l3 = filled(6);
    let cache = over(&l3);
    l3.is_stuck.store(true, Ordering::Release);
    let mut asked = pin!(cache.ask(&Ask::new(&prompt(6))).unwrap());
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    assert!(asked.as_mut().poll(&mut context).is_pending());
    l3.is_stuck.store(false, Ordering::Release);
    let sequence = loop {
        match asked.as_mut().poll(&mut context) {
            Poll::Ready(sequence) => break sequence.unwrap(),
            Poll::Pending => thread::park(),
        }
    };
    assert_eq!(sequence.cached().l3, 6 * PAGE);
    let again = asked.as_mut().poll(&mut context);
    assert!(matches!(again, Poll::Ready(Err(BeginError::Begun))));
}

#[test]
fn a_failed_forward_breaks_the_sequences_that_depend_on_it() {
    let cache = options(20, 20).over(None).unwrap();
    let all = prompt(3);
    let mut first = cache.begin(&all).unwrap();
    let (promise, ticket) = Ticket::promised();
    first.computed_by(2 * PAGE, &ticket).unwrap();
    first.share().unwrap();
    let mut second = cache.begin(&all).unwrap();
    assert_eq!(second.cached().l1, 2 * PAGE);
    assert_eq!([first.verify(), second.verify()], [Ok(false), Ok(false)]);
    promise.settle(Err(DeviceError::Closed));
    for mut sequence in [first, second] {
        assert!(matches!(sequence.verify(), Err(SequenceError::Broken(_))));
        assert!(matches!(sequence.slots(), Err(SequenceError::Broken(_))));
        assert!(matches!(sequence.keep(), Err(SequenceError::Broken(_))));
    }
    assert_eq!(cache.begin(&all).unwrap().cached().tokens(), 0);
    let mut known = cache.begin(&all).unwrap();
    let failed = known.computed_by(PAGE, &Ticket::failed(DeviceError::Closed));
    assert!(matches!(failed, Err(SequenceError::Broken(_))));
    let beyond = known.computed(all.len() + 1);
    assert!(matches!(beyond, Err(SequenceError::Beyond { .. })));
    drop(known);
    is_empty(&cache);
}

#[test]
fn a_push_into_a_reserved_slot_of_a_broken_sequence_is_an_error() {
    let cache = options(20, 20).over(None).unwrap();
    let tokens = prompt(2);
    let asked = cache.ask(&Ask::new(&tokens).reserved(4)).unwrap();
    let mut sequence = asked.begin_within(PATIENCE).unwrap();
    let (promise, ticket) = Ticket::promised();
    sequence.computed_by(tokens.len(), &ticket).unwrap();
    sequence.push(1).unwrap();
    promise.settle(Err(DeviceError::Closed));
    let refused = sequence.push(2);
    assert_eq!(refused, Err(SequenceError::Broken(Broken)));
    assert_eq!(sequence.len(), tokens.len() + 1);
}

#[test]
fn a_share_returns_the_pages_that_the_cache_already_had() {
    let cache = options(20, 20).over(None).unwrap();
    let tokens = prompt(3);
    let mut both = [(); 2].map(|()| cache.begin(&tokens).unwrap());
    let [first, second] = &mut both;
    let former = second.slots().unwrap().pages().to_vec();
    first.computed(2 * PAGE).unwrap();
    second.computed(tokens.len()).unwrap();
    assert_eq!(first.share(), Ok(Vec::new()));
    let replaced = second.share().unwrap();
    let pages = second.slots().unwrap().pages();
    let expected: Vec<Replaced> = [0, 1]
        .map(|at| Replaced {
            at,
            former: former[at],
            page: first.slots().unwrap().pages()[at],
        })
        .into();
    assert_eq!(replaced, expected);
    assert_eq!((pages[0], pages[1]), (replaced[0].page, replaced[1].page));
    assert_eq!(pages[2..], former[2..]);
    assert_eq!(second.share(), Ok(Vec::new()));
}

#[test]
fn rows_are_slices_of_the_pages_and_cached_rows_are_only_read() {
    let cache = options(20, 20).over(None).unwrap();
    let (toy, all) = (toy(), prompt(3));
    serve(&cache, &toy, &all);
    let mut sequence = cache.begin(&all).unwrap();
    let address = |sequence: &larder_tiers::Sequence, position: usize| {
        let slot = sequence.slots().unwrap().slot(position).unwrap();
        let (page, token) = (slot / PAGE as u64, slot % PAGE as u64);
        let page = u32::try_from(page).unwrap();
        let at = ChunkAt {
            part: 1,
            layer: 1,
            page,
        };
        cache.l1().address(at).unwrap() + token * 32
    };
    for position in [0, 17, 3 * PAGE] {
        let row = sequence.row(1, 1, position).unwrap();
        assert_eq!(row.as_ptr().addr() as u64, address(&sequence, position));
        assert_eq!(row.len(), 32);
    }
    let cached = Err(RowError::Cached {
        position: 5,
        first: 3 * PAGE,
    });
    assert_eq!(sequence.row_mut(0, 0, 5).map(drop), cached);
    sequence.row_mut(0, 0, 3 * PAGE).unwrap().fill(1);
    let slots = all.len();
    let none = Err(RowError::NoSlot {
        position: slots,
        slots,
    });
    assert_eq!(sequence.row(0, 0, slots).map(drop), none);
    for (part, layer) in [(0, 2), (2, 0)] {
        let none = Err(RowError::NoSuchRow { part, layer });
        assert_eq!(sequence.row(part, layer, 0).map(drop), none);
        assert_eq!(sequence.row_mut(part, layer, 3 * PAGE).map(drop), none);
    }

    // In memory of another device there are addresses only.
    let device = Arc::new(HostDevice::new().unwrap());
    let l1 = device.alloc_l1(&toy.model().shape(), 21).unwrap();
    let elsewhere = options(20, 20).with(|o| o.l1 = Some(L1Memory::Pool(device, l1)));
    let elsewhere = elsewhere.over(None).unwrap();
    let mut sequence = elsewhere.begin(&all).unwrap();
    assert!(matches!(sequence.get(0, 0, 0), Err(error) if error.is::<RowError>()));
    assert_eq!(
        sequence.row_mut(0, 0, 0).map(drop),
        Err(RowError::NotOnHost)
    );
    assert_eq!(sequence.slots().unwrap().tokens(), slots);
}

/// A load waits for a forward whose ticket never settles. Nothing hangs.
#[test]
fn a_forgotten_ticket_delays_neither_close_nor_drop() {
    for closes in [true, false] {
        // Of the 6 pages of L1 the sequence below has 4, so a load of 3 pages takes some of them.
        let options = options(6, 40).with(|o| o.close_wait = Duration::from_millis(1));
        let cache = options.over(None).unwrap();
        serve(&cache, &toy(), &prompt(3));
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
        cache.evict(100).unwrap();
        let other: Vec<u64> = prompt(3).into_iter().rev().collect();
        let mut running = cache.begin(&other).unwrap();
        let (_promise, ticket) = Ticket::promised();
        running.computed_by(PAGE, &ticket).unwrap();
        drop(running);
        let mut loading = cache.begin(&prompt(3)).unwrap();
        assert_eq!(
            (loading.cached().l2, loading.is_loaded()),
            (3 * PAGE, false)
        );
        if closes {
            let closed = cache.close();
            assert!(
                matches!(closed, Err(CloseError::Unfinished { .. })),
                "{closed:?}"
            );
            assert!(matches!(loading.push(1), Err(SequenceError::Closed(_))));
        }
    }
}

#[test]
fn configurations_under_which_no_page_is_kept_are_refused() {
    let l3 = || Some(Arc::<Memory>::default() as Arc<dyn L3>);
    let field = |options: PrefixOptions| match options.over(l3()) {
        Err(OpenError::Cache(CacheError::Config(error))) => error.field,
        other => panic!("{:?}", other.map(drop)),
    };
    assert_eq!(field(options(20, 0)), "l2_pages");
    assert_eq!(field(options(20, 19)), "l2_pages");
    options(20, 0).over(None).unwrap();
    let write_back = options(20, 19).with(|o| o.config.write_policy = WritePolicy::WriteBack);
    write_back.over(l3()).unwrap();
}

#[test]
fn a_namespace_of_other_pages_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let size = CreateOptions::new(128 << 20);
    let store = Store::open_or_create(&path, &size, OpenOptions::default()).unwrap();
    let store = Arc::new(store);
    let shape = toy().model().shape();
    let KvCounts {
        layers, head_dim, ..
    } = shape.counts();
    let of = |shape: KvShape, layout| {
        let model = Model::new("toy", "seed 42", "f32", shape);
        model.namespace(layout).unwrap()
    };
    let mha = |layers, heads, dim, tokens| KvShape::mha(layers, heads, dim, 4, tokens).unwrap();
    let direct = Layout::PageFirstDirect;
    let tokens = PAGE as u32;
    let by_hand = Namespace::builder("toy", "seed 42", tokens, page_shape(&shape).unwrap());
    let cases = [
        ("page_tokens", of(mha(layers, 1, head_dim, 32), direct)),
        ("parts", of(mha(2 * layers, 1, head_dim, tokens), direct)),
        (
            "layers",
            of(mha(2 * layers, 1, head_dim / 2, tokens), direct),
        ),
        ("heads", of(mha(layers, 2, head_dim / 2, tokens), direct)),
        ("layout", of(shape, Layout::PageFirst)),
        ("attention", by_hand.build().unwrap()),
    ];
    for (expected, namespace) in cases {
        let l3 = StoreL3::new(store.clone(), &namespace).unwrap();
        let refused = options(20, 20).over(Some(Arc::new(l3)));
        let Err(OpenError::Cache(CacheError::Namespace { field, .. })) = refused else {
            panic!("{expected}");
        };
        assert_eq!(field, expected);
    }
    let l3 = StoreL3::new(store, &options(20, 20).namespace().unwrap()).unwrap();
    options(20, 20).over(Some(Arc::new(l3))).unwrap();
    // The pools of a cache have all positions of a page.
    let striped = toy().model().positions(Stripe::new(1, 1, 2).unwrap());
    let refused = PrefixOptions::new(&striped.unwrap(), 20, 20).over(None);
    assert!(matches!(
        refused.err(),
        Some(OpenError::Cache(CacheError::Page { .. }))
    ));
}

#[test]
fn a_cache_without_an_l3_counts_no_page_as_missing_there() {
    let cache = options(4, 4).over(None).unwrap();
    for first in 0..4 {
        let mut tokens = prompt(2);
        tokens[0] = first;
        serve(&cache, &toy(), &tokens);
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    }
    let stats = cache.stats().unwrap();
    assert!(stats.l2_evicted > 0, "{stats:?}");
    assert_eq!((stats.put_failed, stats.put_refused), (0, 0));
}

/// Pages beyond the queue of L3 follow when it is empty.
#[test]
fn pages_that_the_queue_of_l3_refused_are_written_later() {
    let l3 = Arc::<Memory>::default();
    let options = options(30, 30).with(|o| {
        o.config.l3_queue_bytes_max = o.config.page_bytes * 2;
    });
    let cache = options.over(Some(l3.clone())).unwrap();
    serve(&cache, &toy(), &prompt(9));
    put_of(&cache, 9);
    assert_eq!(l3.len(), 9);
    assert!(cache.stats().unwrap().put_delayed > 0);
}

/// A waiting request holds pages of L2, until it is dropped, or has polled without room in L1. No
/// transfer is in flight then.
#[test]
fn pages_that_l2_refused_are_written_when_it_has_room() {
    for is_polled in [false, true] {
        let l3 = filled(5);
        let cache = options(10, 10).over(Some(l3.clone())).unwrap();
        let mut waiting = cache.ask(&Ask::new(&prompt(5))).unwrap();
        eventually("the pages of L3 arrive", || {
            cache.stats().unwrap().l3_hits == 5
        });
        let other: Vec<u64> = prompt(9).into_iter().rev().collect();
        let mut sequence = cache.begin(&other).unwrap();
        sequence.computed(other.len()).unwrap();
        sequence.share().unwrap();
        assert_eq!(cache.stats().unwrap().backup_no_room, 9);
        if is_polled {
            waiting = match waiting.try_begin().unwrap() {
                Begin::Later(waiting) => waiting,
                Begin::Ready(_) => panic!("there is no room"),
            };
        }
        drop(sequence);
        drop(waiting);
        cache.close().unwrap();
        assert_eq!(l3.len(), 5 + 9, "polled: {is_polled}");
    }
}

#[test]
fn values_at_the_ends_of_their_ranges_neither_panic_nor_wrap() {
    let l3 = filled(3);
    let options = || {
        options(20, 40).with(|o| {
            (o.begin_wait, o.close_wait) = (Duration::MAX, Duration::MAX);
            o.config.prefetch.timeout_base_us = u64::MAX;
            o.config.prefetch.timeout_per_1024_tokens_us = u64::MAX;
        })
    };
    let cache = options().over(Some(l3)).unwrap();
    let ask = |reserved| cache.ask(&Ask::new(&prompt(3)).reserved(reserved));
    assert!(matches!(
        ask(usize::MAX).err(),
        Some(BeginError::TooLong { l1_pages: 20, .. })
    ));
    let sequence = ask(0).unwrap().begin_within(Duration::MAX).unwrap();
    assert_eq!(sequence.cached().l3, 3 * PAGE);
    drop(sequence);
    serve(&cache, &toy(), &prompt(3));
    cache.close().unwrap();
    let fields = [
        options().with(|o| o.config.l1_pages = u32::MAX),
        options().with(|o| o.config.l2_pages = u32::MAX),
    ]
    .map(|options| match options.over(None) {
        Err(OpenError::Cache(CacheError::Config(error))) => error.field,
        other => panic!("{:?}", other.map(drop)),
    });
    assert_eq!(fields, ["l1_pages", "l2_pages"]);
}
