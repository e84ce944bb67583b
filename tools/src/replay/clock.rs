//! The time of a trace for the order of eviction of a replay on a real store.
//!
//! A disk serves the requests of an hour in minutes. An order that learns from the times between
//! uses would learn other times than in operation, and would refresh its tables after other
//! numbers of requests. So it is given the times of the trace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_core::policy::order::{EvictionOrder, maker};
use larder_core::policy::{
    Departure, EvictionPolicy, PageFacts, PageNumber, PolicyMaker, ReclaimLines, Use, Worth, make,
};
use larder_format::KeyPrefix;

/// The time of the last request, in milliseconds since one before the first. 0: no request told
/// one.
#[derive(Clone, Debug, Default)]
pub(super) struct TraceClock {
    first: Option<f64>,
    now_ms: Arc<AtomicU64>,
}

impl TraceClock {
    /// A request of this time, in milliseconds, comes next. Time never goes back.
    pub(super) fn tell(&mut self, at_ms: f64) {
        let first = *self.first.get_or_insert(at_ms);
        self.now_ms
            .fetch_max((at_ms - first) as u64 + 1, Ordering::Relaxed);
    }

    /// The same orders, in the time of the trace.
    pub(super) fn over(
        &self,
        orders: PolicyMaker<dyn EvictionOrder>,
    ) -> PolicyMaker<dyn EvictionOrder> {
        let clock = self.clone();
        maker(move || InTraceTime {
            order: make(&orders),
            clock: clock.clone(),
        })
    }
}

/// An order of eviction in the time of a trace.
#[derive(Debug)]
struct InTraceTime {
    order: Box<dyn EvictionOrder>,
    clock: TraceClock,
}

impl InTraceTime {
    fn timed(&self, facts: &PageFacts) -> PageFacts {
        timed(&self.clock, *facts)
    }
}

/// Facts with the time of the trace, if that has one.
fn timed(clock: &TraceClock, mut facts: PageFacts) -> PageFacts {
    match clock.now_ms.load(Ordering::Relaxed) {
        0 => {}
        at_ms => facts.now = Duration::from_millis(at_ms),
    }
    facts
}

impl EvictionPolicy for InTraceTime {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.order.arrived(page, &self.timed(facts));
    }

    fn used(&mut self, page: PageNumber, facts: &PageFacts, by: Use) {
        self.order.used(page, &self.timed(facts), by);
    }

    fn left(&mut self, page: PageNumber, facts: &PageFacts, why: Departure) {
        self.order.left(page, &self.timed(facts), why);
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        self.order.file(page, &self.timed(facts));
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        let clock = &self.clock;
        self.order
            .coldest(&mut |page| facts(page).map(|facts| timed(clock, facts)))
    }

    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth {
        self.order.worth(page, &self.timed(facts))
    }

    fn lines(&self) -> ReclaimLines {
        self.order.lines()
    }

    fn ram_bytes(&self) -> usize {
        self.order.ram_bytes()
    }
}

impl EvictionOrder for InTraceTime {
    fn opened(&mut self, segments: usize) -> Option<String> {
        self.order.opened(segments)
    }

    fn estimates(&mut self) {
        self.order.estimates();
    }

    fn fetch(&self, names: &mut dyn Iterator<Item = (NamespaceId, KeyPrefix)>) {
        self.order.fetch(names);
    }

    fn fetch_used(&self, pages: &[PageNumber]) {
        self.order.fetch_used(pages);
    }

    fn linked(&mut self, page: PageNumber, facts: &PageFacts) {
        self.order.linked(page, &self.timed(facts));
    }

    fn child(&self, page: PageNumber) -> Option<PageNumber> {
        self.order.child(page)
    }

    fn sees_lookups(&self) -> bool {
        self.order.sees_lookups()
    }

    fn written(&mut self, put: u64, copied: u64) {
        self.order.written(put, copied);
    }

    fn lessons(&self) -> Vec<u8> {
        self.order.lessons()
    }

    fn note(&self, page: PageNumber, key: KeyPrefix) -> Option<u128> {
        self.order.note(page, key)
    }

    fn recall(&mut self, lessons: &[u8], notes: Vec<u128>) {
        self.order.recall(lessons, notes);
    }

    fn loaded(&mut self) {
        self.order.loaded();
    }

    fn order(&self) -> String {
        self.order.order()
    }

    fn scale(&self) -> u64 {
        self.order.scale()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;

    use larder_engine::{CreateOptions, OpenOptions, PageStore, Store};

    use super::*;
    use crate::session::Session;
    use crate::size::ByteSize;
    use crate::workload;

    /// Notes the times of the pages that arrive, and evicts none.
    #[derive(Debug, Default)]
    struct Arrivals(Arc<Mutex<Vec<Duration>>>);

    impl EvictionPolicy for Arrivals {
        fn arrived(&mut self, _: PageNumber, facts: &PageFacts) {
            self.0.lock().unwrap().push(facts.now);
        }

        fn file(&mut self, _: PageNumber, _: &PageFacts) {}

        fn coldest(
            &mut self,
            _: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
        ) -> Option<PageNumber> {
            None
        }

        fn worth(&self, _: PageNumber, _: &PageFacts) -> Worth {
            Worth(0)
        }
    }

    #[test]
    fn an_order_sees_the_times_of_the_trace() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = CreateOptions::new(4 << 20).with(|o| o.segment_size = Some(256 << 10));
        larder_engine::create(&path, &options).unwrap();
        let arrivals = Arc::<Mutex<Vec<Duration>>>::default();
        let noted = arrivals.clone();
        let mut clock = TraceClock::default();
        let orders = clock.over(PolicyMaker::eviction(move || Arrivals(noted.clone())));
        let store = Store::open(
            &path,
            OpenOptions::default().with(|o| o.eviction = Some(orders)),
        );
        let store = store.unwrap();
        let shape = workload::shape(ByteSize(4096), 1).unwrap();
        let namespace = workload::namespace("clock", 1, shape).unwrap();
        let namespace = store.namespace(&namespace).unwrap();
        let mut session = Session::new(&store, namespace, &shape).unwrap();
        // The day of the trace is not that of the replay.
        let first = 1.7e12;
        for (at, seconds) in [0.0, 3600.0, 1800.0].into_iter().enumerate() {
            clock.tell(first + seconds * 1e3);
            let keys = workload::chain(&[at as u64]);
            session.serve_part(&keys, 0..1, 1, &mut Vec::new()).unwrap();
        }
        let seen: Vec<_> = arrivals
            .lock()
            .unwrap()
            .iter()
            .map(Duration::as_secs)
            .collect();
        assert_eq!(seen, [0, 3600, 3600]);
        drop(session);
        store.close().unwrap();
    }
}
