//! A miniature of a store: an order of eviction over a sample of the pages, without their bytes.
//!
//! It has the room that the sample would have of a store. Its parent of a page is the nearest
//! sampled page above. Eviction goes as in a store: room is made before pages arrive, leaves go
//! alone, and no page goes while its child is being put. It evicts single pages, where a store
//! reclaims segments.
//!
//! A lookup counts as a read of the pages that it finds: whether a store of another size would
//! read them follows from no read of the present one.

use std::collections::HashMap;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_format::{BLOCK_BYTES, KeyPrefix, PageKey};

use super::order::EvictionOrder;
use super::{Departure, PageFacts, PageNumber, Use};
use crate::hint::Hint;

/// No parent.
const NONE: u32 = u32::MAX;

/// Odd, to mix the bits of a hash.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// A sampled page of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sampled {
    /// The hash that names it.
    pub hash: u64,
    /// Number of pages before it in its chain.
    pub depth: u32,
    /// The store had it before the call.
    pub was_stored: bool,
}

/// What a call says of all its pages.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub namespace: NamespaceId,
    /// Usable blocks that a page takes.
    pub blocks: u32,
    pub hint: Hint,
    /// Pages that are not stored, of the sample or not.
    pub new_pages: u32,
    pub now_ms: u64,
}

/// A page, or a free place.
#[derive(Clone, Copy, Debug)]
struct Page {
    hash: u64,
    parent: u32,
    /// Stored children, and pages of a put that wait for this parent.
    children: u32,
    blocks: u32,
    depth: u32,
    hint: Hint,
    hits: u32,
    /// The number and the time of the call that used it last.
    call: u32,
    used_ms: u64,
    namespace: NamespaceId,
    is_stored: bool,
    /// The order holds it as a leaf.
    is_filed: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Miniature {
    order: Box<dyn EvictionOrder>,
    numbers: HashMap<u64, u32, rapidhash::quality::RandomState>,
    pages: Vec<Page>,
    free: Vec<u32>,
    taken: u64,
    room: u64,
    calls: u32,
    now_ms: u64,
}

impl Miniature {
    /// With room for so many blocks.
    pub fn new(order: Box<dyn EvictionOrder>, room: u64) -> Miniature {
        Miniature {
            order,
            numbers: HashMap::default(),
            pages: Vec::new(),
            free: Vec::new(),
            taken: 0,
            room,
            calls: 0,
            now_ms: 0,
        }
    }

    /// Stored pages.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Bytes allocated.
    pub fn ram_bytes(&self) -> usize {
        self.order.ram_bytes()
            + self.numbers.capacity() * (size_of::<(u64, u32)>() + 1)
            + self.pages.capacity() * size_of::<Page>()
            + self.free.capacity() * size_of::<u32>()
    }

    /// A lookup of a chain, which reads the pages before the first missing page. Returns the
    /// number of these sampled pages.
    pub fn looked_up(&mut self, chain: &[Sampled], now_ms: u64) -> usize {
        self.begin(now_ms);
        let mut found = 0;
        for page in chain {
            let Some(id) = self.numbers.get(&page.hash).copied() else {
                break;
            };
            self.use_page(id, Use::Read, None, None);
            found += 1;
        }
        found
    }

    /// A touch of these pages, as far as they are stored.
    pub fn touched(&mut self, chain: &[Sampled], call: &Call) {
        self.begin(call.now_ms);
        let hint = Some(call.hint).filter(|hint| *hint != Hint::default());
        // A page that this store has and the real one had not is no part of this store's call.
        for page in chain.iter().filter(|page| page.was_stored) {
            if let Some(id) = self.numbers.get(&page.hash).copied() {
                self.use_page(id, Use::Touch, Some(call.new_pages), hint);
            }
        }
    }

    /// A put of pages of a chain. `above` is the nearest sampled page above the first one.
    pub fn put(&mut self, above: Option<u64>, chain: &[Sampled], call: &Call) {
        self.touched(chain, call);
        let known = |page: &Sampled| self.numbers.get(&page.hash).copied();
        let stored: Vec<u32> = chain.iter().filter_map(known).collect();
        let new = (chain.len() - stored.len()) as u64;
        let above = above.and_then(|hash| self.numbers.get(&hash).copied());
        let parents: Vec<u32> = above.into_iter().chain(stored).collect();
        for id in &parents {
            self.pages[*id as usize].children += 1;
        }
        while self.taken + new * u64::from(call.blocks) > self.room && self.evict() {}
        let mut last = above;
        for page in chain {
            let known = self.numbers.get(&page.hash).copied();
            last = Some(known.unwrap_or_else(|| self.arrive(page, last, call)));
        }
        for id in &parents {
            self.pages[*id as usize].children -= 1;
        }
        let ids = chain.iter().filter_map(|page| self.numbers.get(&page.hash));
        let ids: Vec<u32> = ids.copied().chain(above).collect();
        ids.into_iter().for_each(|id| self.file(id));
    }

    fn begin(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        self.calls = self.calls.wrapping_add(1);
    }

    fn facts(&self, id: u32, new_pages: Option<u32>) -> PageFacts {
        let clock = (self.calls, self.now_ms);
        PageFacts {
            new_pages,
            ..self.pages[id as usize].facts(clock)
        }
    }

    fn use_page(&mut self, id: u32, by: Use, new_pages: Option<u32>, hint: Option<Hint>) {
        let page = &mut self.pages[id as usize];
        (page.call, page.used_ms) = (self.calls, self.now_ms);
        page.hits = (page.hits + 1).min(255);
        page.hint = hint.unwrap_or(page.hint);
        let facts = self.facts(id, new_pages);
        self.order.used(PageNumber(id), &facts, by);
    }

    fn arrive(&mut self, page: &Sampled, parent: Option<u32>, call: &Call) -> u32 {
        let new = Page {
            hash: page.hash,
            parent: parent.unwrap_or(NONE),
            children: 0,
            blocks: call.blocks,
            depth: page.depth,
            hint: call.hint,
            hits: 0,
            call: self.calls,
            used_ms: self.now_ms,
            namespace: call.namespace,
            is_stored: true,
            is_filed: false,
        };
        let id = self.free.pop().unwrap_or(self.pages.len() as u32);
        match self.pages.get_mut(id as usize) {
            Some(place) => *place = new,
            None => self.pages.push(new),
        }
        if let Some(parent) = parent {
            self.pages[parent as usize].children += 1;
        }
        self.numbers.insert(page.hash, id);
        self.taken += u64::from(call.blocks);
        let facts = self.facts(id, Some(call.new_pages));
        self.order.arrived(PageNumber(id), &facts);
        id
    }

    /// Gives the order a page that is a leaf.
    fn file(&mut self, id: u32) {
        let page = &mut self.pages[id as usize];
        if page.is_stored && page.children == 0 && !page.is_filed {
            page.is_filed = true;
            let facts = self.facts(id, None);
            self.order.file(PageNumber(id), &facts);
        }
    }

    /// Evicts the leaf that goes next. False if there is none.
    fn evict(&mut self) -> bool {
        let (pages, clock) = (&mut self.pages, (self.calls, self.now_ms));
        let found = self.order.coldest(&mut |page| {
            let page = pages.get_mut(page.0 as usize)?;
            let was_filed = page.is_filed;
            page.is_filed = was_filed && page.children == 0;
            page.is_filed.then(|| page.facts(clock))
        });
        // The order is not trusted.
        let Some(id) = found.map(|page| page.0) else {
            return false;
        };
        let Some(page) = self.pages.get_mut(id as usize).filter(|page| page.is_filed) else {
            return false;
        };
        page.is_filed = false;
        let facts = self.facts(id, None);
        self.order.left(PageNumber(id), &facts, Departure::Evicted);
        let page = &mut self.pages[id as usize];
        page.is_stored = false;
        let gone = *page;
        self.numbers.remove(&gone.hash);
        self.free.push(id);
        self.taken -= u64::from(gone.blocks);
        if gone.parent != NONE {
            self.pages[gone.parent as usize].children -= 1;
            self.file(gone.parent);
        }
        true
    }
}

impl Page {
    fn facts(&self, (calls, now_ms): (u32, u64)) -> PageFacts {
        let number = (self.hash ^ MIX).wrapping_mul(MIX);
        let number = (number ^ (number >> 29)).wrapping_mul(MIX);
        PageFacts {
            namespace: self.namespace,
            key: key_of(number ^ (number >> 32)),
            depth: self.depth,
            children: self.children,
            hits: self.hits,
            idle_calls: calls.wrapping_sub(self.call),
            idle: Duration::from_millis(now_ms - self.used_ms),
            hint: self.hint,
            bytes: u64::from(self.blocks) * BLOCK_BYTES as u64,
            parent: (self.parent != NONE).then_some(PageNumber(self.parent)),
            new_pages: None,
            now: Duration::from_millis(now_ms),
        }
    }
}

/// A key like that of a stored page: all its bits differ from page to page, where the hashes of
/// sampled pages share the first ones.
fn key_of(number: u64) -> KeyPrefix {
    let mut bytes = [0; 32];
    for (place, byte) in bytes.iter_mut().zip(number.to_le_bytes()) {
        *place = byte;
    }
    PageKey::from_bytes(bytes).prefix()
}
