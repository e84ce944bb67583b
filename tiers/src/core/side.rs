//! The window pages and states of a request.
//!
//! ```text
//!  tokens   0 ........................ computed ....... slots
//!  window                   | pages of the pool | own pages |
//!  state                                 one own block, which forwards change
//! ```
//!
//! A hold is kept until the forward and the load of its page have ended, though the page is no
//! longer needed: until then the request depends on them.

use std::collections::{BTreeMap, VecDeque};

use crate::config::TailKind;
use crate::tails::Hold;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct RequestTails {
    /// Number of pages of the prefix from which it starts.
    pub(super) first: usize,
    /// Number of units whose forwards have been reported.
    pub(super) computed: usize,
    /// A longer prefix that can be loaded, until that is decided.
    pub(super) wish: Option<Wish>,
    /// One for each pool.
    pub(super) pools: Vec<OfPool>,
    /// Holds that are not needed, of pages whose forwards or loads have not ended.
    pub(super) retired: Vec<(usize, Hold)>,
    /// The states have their own blocks, and the prefix changes no more.
    pub(super) has_begun: bool,
}

/// A prefix, with holds of the pages that it needs, by pool.
#[derive(Debug)]
pub(super) struct Wish {
    pub(super) pages: usize,
    pub(super) holds: Vec<Vec<Hold>>,
}

/// What a request has of a pool.
#[derive(Debug)]
pub(super) enum OfPool {
    Window(Window),
    State(State),
}

/// Pages of a window, the first one under the number `first` in the prompt.
#[derive(Debug, Default)]
pub(super) struct Window {
    pub(super) first: usize,
    pub(super) pages: VecDeque<WindowPage>,
}

#[derive(Debug)]
pub(super) enum WindowPage {
    Own(u32),
    Held(Hold, u32),
}

/// A state: the block that forwards change, and copies of it.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The block; `None` before it has begun.
    pub(super) own: Option<u32>,
    /// The state from which it starts; `None` at the first token, or once it is copied.
    pub(super) start: Option<Hold>,
    /// Copies at borders, by the number of pages before them.
    pub(super) kept: BTreeMap<usize, u32>,
}

impl WindowPage {
    pub(super) fn number(&self) -> u32 {
        match self {
            WindowPage::Own(page) | WindowPage::Held(_, page) => *page,
        }
    }
}

impl Window {
    /// The page behind the last one, by its number in the prompt.
    pub(super) fn end(&self) -> usize {
        self.first + self.pages.len()
    }
}

impl OfPool {
    /// The pages with which a prefix of `pages` pages starts.
    pub(super) fn starting(kind: TailKind, pages: usize, holds: Vec<Hold>) -> OfPool {
        match kind {
            TailKind::Window { .. } => OfPool::Window(Window {
                first: pages - holds.len(),
                pages: holds
                    .into_iter()
                    .map(|hold| {
                        let page = hold.page().unwrap_or_default();
                        WindowPage::Held(hold, page)
                    })
                    .collect(),
            }),
            TailKind::State { .. } => OfPool::State(State {
                own: None,
                start: holds.into_iter().next(),
                kept: BTreeMap::new(),
            }),
        }
    }

    fn holds(&self) -> Vec<&Hold> {
        match self {
            OfPool::Window(window) => {
                let mut held = Vec::new();
                for page in &window.pages {
                    if let WindowPage::Held(hold, _) = page {
                        held.push(hold);
                    }
                }
                held
            }
            OfPool::State(state) => state.start.iter().collect(),
        }
    }

    /// Pages of L1 that the request owns.
    pub(super) fn own_pages(&self) -> Vec<u32> {
        match self {
            OfPool::Window(window) => {
                let own = |page: &WindowPage| match page {
                    WindowPage::Own(page) => Some(*page),
                    WindowPage::Held(..) => None,
                };
                window.pages.iter().filter_map(own).collect()
            }
            OfPool::State(state) => state
                .own
                .iter()
                .chain(state.kept.values())
                .copied()
                .collect(),
        }
    }

    /// All holds and all own pages: the request ends.
    pub(super) fn into_parts(self) -> (Vec<Hold>, Vec<u32>) {
        let own = self.own_pages();
        let holds = match self {
            OfPool::Window(window) => {
                let held = |page| match page {
                    WindowPage::Held(hold, _) => Some(hold),
                    WindowPage::Own(_) => None,
                };
                window.pages.into_iter().filter_map(held).collect()
            }
            OfPool::State(state) => state.start.into_iter().collect(),
        };
        (holds, own)
    }
}

impl RequestTails {
    /// All holds, by pool.
    pub(super) fn holds(&self) -> impl Iterator<Item = (usize, &Hold)> {
        let of_pools = self.pools.iter().enumerate();
        let of_pools =
            of_pools.flat_map(|(pool, of)| of.holds().into_iter().map(move |hold| (pool, hold)));
        let retired = self.retired.iter().map(|(pool, hold)| (*pool, hold));
        of_pools.chain(retired)
    }

    /// Number of holds of the prefix that can be loaded.
    pub(super) fn wished_holds(&self) -> impl Iterator<Item = (usize, &Hold)> {
        let holds = self
            .wish
            .iter()
            .flat_map(|wish| wish.holds.iter().enumerate());
        holds.flat_map(|(pool, holds)| holds.iter().map(move |hold| (pool, hold)))
    }
}
