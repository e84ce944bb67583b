//! The facts of stored pages, 16 bytes each, by their numbers.

use larder_base::ahead::fetch;
use larder_core::chunks::Chunks;

use super::class::{CLASS_BITS, ClassId};
use super::ghost::Memory;
use super::recency::Epoch;

/// The facts of a stored page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Page {
    /// When it was used last.
    pub last: u32,
    /// The child through which the last request went.
    pub child: u32,
    /// Its position in the heap of its class.
    pub at: u32,
    /// The epoch of its last use.
    pub epoch: Epoch,
    /// Class, memory, and whether its branch was left.
    rest: u16,
}

/// No child; no position.
pub(super) const NONE: u32 = u32::MAX;

const MEMORY_SHIFT: u32 = CLASS_BITS;
const IS_SUPERSEDED: u16 = 1 << (CLASS_BITS + Memory::BITS);
const _: () = assert!(CLASS_BITS + Memory::BITS < u16::BITS);

impl Page {
    pub(super) fn new(memory: Memory) -> Page {
        Page {
            last: 0,
            child: NONE,
            at: NONE,
            epoch: 0,
            rest: u16::from(memory.bits()) << MEMORY_SHIFT,
        }
    }

    /// A page of an earlier open, no leaf yet. Its traits may be those of another release.
    pub(super) fn with(last: u32, traits: u16, epoch: Epoch) -> Page {
        let mut page = Page::new(Memory::NEW);
        (page.last, page.rest, page.epoch) = (last, traits, epoch);
        page.set_memory(page.memory().valid());
        page
    }

    /// Class, memory, and whether its branch was left, for [`Page::with`].
    pub(super) fn traits(&self) -> u16 {
        self.rest
    }

    pub(super) fn class(&self) -> ClassId {
        self.rest & ((1 << CLASS_BITS) - 1)
    }

    pub(super) fn set_class(&mut self, class: ClassId) {
        self.rest = self.rest & !((1 << CLASS_BITS) - 1) | class;
    }

    pub(super) fn memory(&self) -> Memory {
        Memory::from_bits((self.rest >> MEMORY_SHIFT) as u8 & ((1 << Memory::BITS) - 1))
    }

    pub(super) fn set_memory(&mut self, memory: Memory) {
        let mask = ((1 << Memory::BITS) - 1) << MEMORY_SHIFT;
        self.rest = self.rest & !mask | u16::from(memory.bits()) << MEMORY_SHIFT;
    }

    /// The last request through its parent went elsewhere.
    pub(super) fn is_superseded(&self) -> bool {
        self.rest & IS_SUPERSEDED != 0
    }

    pub(super) fn supersede(&mut self) {
        self.rest |= IS_SUPERSEDED;
    }

    pub(super) fn return_to(&mut self) {
        self.rest &= !IS_SUPERSEDED;
    }

    /// The policy holds it as a leaf.
    pub(super) fn is_filed(&self) -> bool {
        self.at != NONE
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pages(Chunks<Page>);

impl Default for Pages {
    fn default() -> Pages {
        Pages(Chunks::new())
    }
}

impl Pages {
    /// A page, if there ever was one of this number.
    pub(super) fn find(&self, id: u32) -> Option<&Page> {
        ((id as usize) < self.0.len()).then(|| self.0.get(id as usize))
    }

    /// A page that was put.
    #[inline]
    pub(super) fn get(&self, id: u32) -> &Page {
        self.0.get(id as usize)
    }

    /// Fetches the cache line of a page that was put.
    #[inline]
    pub(super) fn fetch(&self, id: u32) {
        fetch(self.get(id));
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: u32) -> &mut Page {
        self.0.get_mut(id as usize)
    }

    pub(super) fn put(&mut self, id: u32, page: Page) {
        while self.0.len() <= id as usize {
            self.0.push(Page::new(Memory::NEW));
        }
        *self.0.get_mut(id as usize) = page;
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.0.ram_bytes()
    }
}
