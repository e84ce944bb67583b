//! A synthetic chat load: conversations that grow turn by turn behind a few shared system prompts.
//!
//! A pure function of its seed, so that a second process continues where a killed one stopped. Each
//! turn asks for the whole conversation so far and adds a few pages to it, as a chat server does.
//! Only the shape of real traffic is modelled: long shared prefixes, interleaved conversations, new
//! pages at the end.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

/// Different system prompts.
const PROMPTS: u64 = 3;

/// Pages of a system prompt.
const PROMPT_PAGES: u64 = 8;

/// Conversations going on at once.
const CONVERSATIONS: usize = 12;

/// Turns after which a conversation ends and a new one takes its place.
const TURNS_MAX: u32 = 8;

/// Fewest and most pages that a turn adds.
const TURN_PAGES: std::ops::RangeInclusive<u64> = 4..=10;

/// Sets the pages of conversations apart from those of system prompts.
const CONVERSATION_TOKENS: u64 = 1 << 32;

/// The turns of all conversations, without end. Each is the tokens of its pages, one a page, in
/// order.
pub struct Turns {
    random: Pcg64,
    conversations: Vec<Conversation>,
    next_token: u64,
}

struct Conversation {
    tokens: Vec<u64>,
    turns: u32,
}

impl Turns {
    /// The turns for `seed`.
    pub fn new(seed: u64) -> Self {
        let mut random = Pcg64::seed_from_u64(seed);
        let conversations = (0..CONVERSATIONS)
            .map(|_| Conversation::new(&mut random))
            .collect();
        Turns {
            random,
            conversations,
            next_token: CONVERSATION_TOKENS,
        }
    }
}

impl Conversation {
    fn new(random: &mut Pcg64) -> Self {
        let prompt = random.random_range(0..PROMPTS);
        Conversation {
            tokens: (0..PROMPT_PAGES)
                .map(|page| prompt * PROMPT_PAGES + page)
                .collect(),
            turns: 0,
        }
    }
}

impl Iterator for Turns {
    type Item = Vec<u64>;

    fn next(&mut self) -> Option<Vec<u64>> {
        let place = self.random.random_range(0..CONVERSATIONS);
        let pages = self.random.random_range(TURN_PAGES);
        let conversation = self.conversations.get_mut(place)?;
        if conversation.turns == TURNS_MAX {
            *conversation = Conversation::new(&mut self.random);
        }
        conversation.turns += 1;
        conversation
            .tokens
            .extend(self.next_token..self.next_token + pages);
        self.next_token += pages;
        Some(conversation.tokens.clone())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_seed_names_its_turns() {
        let turns: Vec<_> = Turns::new(7).take(50).collect();
        assert_eq!(turns, Turns::new(7).take(50).collect::<Vec<_>>());
        assert_ne!(turns, Turns::new(8).take(50).collect::<Vec<_>>());
    }

    #[test]
    fn most_of_what_a_turn_asks_for_was_there_before() {
        let mut seen = std::collections::HashSet::new();
        let (mut asked, mut new) = (0, 0);
        for turn in Turns::new(1).take(300) {
            asked += turn.len();
            new += turn.into_iter().filter(|token| seen.insert(*token)).count();
        }
        let hit_rate = 1.0 - new as f64 / asked as f64;
        assert!((0.6..0.95).contains(&hit_rate), "{hit_rate}");
    }
}
