//! A caller's knowledge of pages that the store cannot see: for policies.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A class of pages, a priority and a session, in 4 bytes. Kept in RAM as long as the page is
/// stored, if a policy is chosen; not on disk.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hint(u32);

/// Number of classes.
const CLASSES: u32 = 64;

/// Classes of turns follow this number: one for each stop and each length of the answer.
const TURNS: u8 = 7;
const STOPS: u8 = 4;
const LENGTHS: u8 = 6;

/// Why the answer to a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stop {
    /// Not known.
    #[default]
    Unknown,
    /// With a call of a tool: its result will follow.
    ToolCall,
    /// At the end of the turn.
    EndOfTurn,
    /// Otherwise, for example at a limit.
    Other,
}

/// The kind of the tokens of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Class(u8);

impl Class {
    /// Not known.
    pub const UNKNOWN: Class = Class(0);
    /// A system prompt, or tool definitions.
    pub const SYSTEM: Class = Class(1);
    /// A turn of the user.
    pub const USER: Class = Class(2);
    /// The answer of the model.
    pub const ANSWER: Class = Class(3);
    /// The output of a tool.
    pub const TOOL: Class = Class(4);
    /// Reasoning of the model, which later turns may leave out.
    pub const REASONING: Class = Class(5);
    /// Tokens that were computed ahead and may not be used.
    pub const SPECULATIVE: Class = Class(6);
    /// A retrieved document.
    pub const DOCUMENT: Class = Class(7);

    /// The end of a prompt that does not fill a page.
    pub const PARTIAL: Class = Class(31);

    /// A page of a request whose answer ended for this reason and has so many tokens. Both may be
    /// known only after the page was put: a touch tells them then.
    #[must_use]
    pub const fn of_turn(stop: Stop, output_tokens: Option<u32>) -> Class {
        let length = match output_tokens {
            None => 0,
            Some(0..32) => 1,
            Some(32..128) => 2,
            Some(128..512) => 3,
            Some(512..2048) => 4,
            Some(_) => 5,
        };
        match stop as u8 * LENGTHS + length {
            0 => Class::UNKNOWN,
            turn => Class(TURNS + turn),
        }
    }

    /// The class of a number; `None` from 64 on. Those from 32 on are the caller's own: no release
    /// will name them.
    #[must_use]
    pub const fn new(number: u8) -> Option<Class> {
        if (number as u32) < CLASSES {
            Some(Class(number))
        } else {
            None
        }
    }

    /// Its number, below 64.
    #[must_use]
    pub const fn number(self) -> u8 {
        self.0
    }
}

/// Why the answer of the request of a class ended, and the length of that answer, as small numbers:
/// 0 where they are not known.
#[must_use]
pub const fn turn(class: Class) -> (u8, u8) {
    match class.0.checked_sub(TURNS) {
        Some(turn) if turn < STOPS * LENGTHS => (turn / LENGTHS, turn % LENGTHS),
        _ => (0, 0),
    }
}

impl Hint {
    /// A page of this class, with priority 0 and no session.
    #[must_use]
    pub const fn new(class: Class) -> Hint {
        Hint(class.0 as u32)
    }

    /// With a priority: 0 to 15; above it 15.
    #[must_use]
    pub const fn priority(self, priority: u8) -> Hint {
        let priority = if priority > 15 { 15 } else { priority };
        Hint(self.0 & !(15 * CLASSES) | (priority as u32 * CLASSES))
    }

    /// With a session: 22 bits of a hash of its name, which is not kept. So two sessions out of
    /// four million may look like one.
    #[must_use]
    pub fn session(self, name: &[u8]) -> Hint {
        let hash = rapidhash::v3::rapidhash_v3(name);
        // 0 stands for no session.
        let bits = (hash as u32 & SESSION_MAX).max(1);
        Hint(self.0 & ((1 << SESSION_SHIFT) - 1) | bits << SESSION_SHIFT)
    }

    /// The class, the priority, and 22 bits that name the session; `None` without one.
    #[must_use]
    pub const fn parts(self) -> (Class, u8, Option<u32>) {
        let session = self.0 >> SESSION_SHIFT;
        let class = Class((self.0 % CLASSES) as u8);
        let priority = (self.0 / CLASSES % 16) as u8;
        (
            class,
            priority,
            if session == 0 { None } else { Some(session) },
        )
    }

    pub(crate) const fn bits(self) -> u32 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u32) -> Hint {
        Hint(bits)
    }
}

const SESSION_SHIFT: u32 = 10;
const SESSION_MAX: u32 = (1 << 22) - 1;

impl fmt::Debug for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (class, priority, session) = self.parts();
        write!(f, "Hint({}, {priority}, {session:?})", class.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_hint_keeps_class_priority_and_session_apart() {
        let hint = Hint::new(Class::TOOL).priority(9).session(b"a");
        let (class, priority, session) = hint.parts();
        assert_eq!((class, priority), (Class::TOOL, 9));
        assert!(session.is_some_and(|bits| bits <= SESSION_MAX));
        let other = Hint::new(Class::TOOL).session(b"b").priority(9);
        assert_ne!(hint, other);
        assert_eq!(hint.priority(3).session(b"b"), other.priority(3));
        assert_eq!(hint.priority(200).parts().1, 15);
        assert_eq!(Hint::default().parts(), (Class::UNKNOWN, 0, None));
    }

    #[test]
    fn a_turn_keeps_its_stop_and_its_length_and_shares_no_number_with_other_classes() {
        let mut seen = std::collections::HashSet::new();
        let stops = [Stop::Unknown, Stop::ToolCall, Stop::EndOfTurn, Stop::Other];
        for (stop, number) in stops.into_iter().zip(0..) {
            for (tokens, length) in [None, Some(1), Some(100), Some(511), Some(512), Some(9999)]
                .into_iter()
                .zip(0..)
            {
                let class = Class::of_turn(stop, tokens);
                assert_eq!(turn(class), (number, length));
                assert!(seen.insert(class) && class != Class::DOCUMENT && class != Class::PARTIAL);
                assert!(class.number() < 32);
            }
        }
        assert_eq!(turn(Class::DOCUMENT), (0, 0));
        assert_eq!(turn(Class::PARTIAL), (0, 0));
    }

    #[test]
    fn a_class_is_one_of_64_and_only_the_named_ones_have_low_numbers() {
        assert_eq!(Class::new(4), Some(Class::TOOL));
        let own = Class::new(63).unwrap();
        assert_eq!(Hint::new(own).priority(15).parts(), (own, 15, None));
        assert_eq!(Class::new(64), None);
    }
}
