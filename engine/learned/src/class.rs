//! The class of a page.
//!
//! A class is a tuple of traits. Those of the request (new pages, output tokens, stop) are shared
//! by all its pages: they tell conversations that go on from others. A page's own are its hits, its
//! children, and whether its branch was left.

use std::collections::HashMap;

use larder_base::planted;
use larder_core::hint::turn;
use larder_core::policy::PageFacts;
use rapidhash::quality::RandomState;

use super::ghost::Memory;

/// A number of a class.
pub(super) type ClassId = u16;

/// Number of traits.
pub(super) const TRAITS: usize = 8;

/// Values of a trait, at most.
pub(super) const VALUES: usize = 8;

/// Bits of the number of a class.
pub(super) const CLASS_BITS: u32 = 9;

/// Most classes. Pages of further ones have class 0, whose traits are unknown.
const CLASSES_MAX: usize = 1 << CLASS_BITS;

/// Groups of namespaces that learn apart: the first ones each their own, all others one.
const GROUPS: u8 = 4;

/// The traits of a page, each a small number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Traits([u8; TRAITS]);

const HITS: usize = 0;
const CHILDREN: usize = 1;
const SUPERSEDED: usize = 2;
const PARTIAL: usize = 3;
const NEW_PAGES: usize = 4;
const OUTPUT: usize = 5;
const STOP: usize = 6;
const GROUP: usize = 7;

/// The value of an unknown trait.
const UNKNOWN: u8 = VALUES as u8 - 1;

/// The number of bounds that a number reaches.
const fn step<const N: usize>(number: u32, bounds: [u32; N]) -> u8 {
    let mut at = 0;
    while at < N && bounds[at] <= number {
        at += 1;
    }
    at as u8
}

/// The steps of the numbers that a memory can hold.
const fn steps<const N: usize>(bounds: [u32; N]) -> [u8; 8] {
    let mut steps = [0; 8];
    let mut number = 0;
    while number < 8 {
        steps[number] = step(number as u32, bounds);
        number += 1;
    }
    steps
}

const HIT_STEPS: [u8; 8] = steps([1, 2, 3, 6]);
const CHILD_STEPS: [u8; 8] = steps([1, 2, 4]);

impl Traits {
    /// Those of a page that is used now.
    #[inline]
    pub(super) fn of(facts: &PageFacts, memory: Memory) -> Traits {
        let (class, _, _) = facts.hint.parts();
        let (stop, output) = turn(class);
        let mut traits = [0; TRAITS];
        traits[HITS] = HIT_STEPS[usize::from(memory.hits() & 7)];
        traits[PARTIAL] = u8::from(class == larder_core::hint::Class::PARTIAL);
        traits[NEW_PAGES] = facts
            .new_pages
            .map_or(UNKNOWN, |new| step(new, [2, 5, 13, 41]));
        traits[OUTPUT] = output;
        traits[STOP] = stop;
        traits[GROUP] = (facts.namespace.0.min(u16::from(GROUPS) - 1)) as u8;
        Traits(traits).with_children(memory)
    }

    pub(super) fn with_children(mut self, memory: Memory) -> Traits {
        self.0[CHILDREN] = CHILD_STEPS[usize::from(memory.children() & 7)];
        self
    }

    pub(super) fn superseded(mut self) -> Traits {
        self.0[SUPERSEDED] = 1;
        self
    }

    pub(super) fn values(self) -> [u8; TRAITS] {
        self.0
    }
}

/// The classes that occurred.
#[derive(Debug)]
pub(super) struct Classes {
    known: HashMap<Traits, ClassId, RandomState>,
    traits: Vec<Traits>,
    /// Classes that were asked for lately, each at the place that its traits give: pages of a
    /// request share a few.
    recent: [(Traits, ClassId); RECENT],
}

/// A power of two.
const RECENT: usize = 64;

fn place_of(traits: Traits) -> usize {
    let number = u64::from_le_bytes(traits.0);
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - RECENT.trailing_zeros())) as usize
}

impl Default for Classes {
    fn default() -> Classes {
        let unknown = Traits([UNKNOWN; TRAITS]);
        Classes {
            known: HashMap::default(),
            traits: vec![unknown],
            recent: [(unknown, 0); RECENT],
        }
    }
}

impl Classes {
    /// The number of a class.
    #[inline]
    pub(super) fn of(&mut self, traits: Traits) -> ClassId {
        let recent = place_of(traits);
        if self.recent[recent].0 == traits {
            return self.recent[recent].1;
        }
        let class = self.find(traits);
        self.recent[recent] = (traits, class);
        class
    }

    #[cold]
    fn find(&mut self, traits: Traits) -> ClassId {
        let known = self.known.get(&traits).copied();
        known.unwrap_or_else(|| self.add(traits))
    }

    fn add(&mut self, traits: Traits) -> ClassId {
        if self.traits.len() >= CLASSES_MAX {
            return 0;
        }
        let class = self.traits.len() as ClassId;
        self.traits.push(traits);
        self.known.insert(traits, class);
        class
    }

    pub(super) fn traits(&self, class: ClassId) -> Traits {
        self.traits[usize::from(class)]
    }

    /// Classes with these traits, in the order of their numbers; `None` if there can be none such.
    pub(super) fn with(all: &[[u8; TRAITS]]) -> Option<Classes> {
        let mut classes = Classes::default();
        for (number, values) in all.iter().enumerate() {
            let is_known = values.iter().all(|value| usize::from(*value) < VALUES);
            let class = classes.of(Traits(*values));
            if (!is_known || usize::from(class) != number) && !planted!(BlindLessons) {
                return None;
            }
        }
        Some(classes)
    }

    /// All classes in the order of their numbers.
    pub(super) fn all(&self) -> &[Traits] {
        &self.traits
    }

    pub(super) fn ram_bytes(&self) -> usize {
        self.traits.capacity() * size_of::<Traits>()
            + self.known.capacity() * size_of::<(Traits, ClassId)>()
    }
}
