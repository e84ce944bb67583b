//! A request before it has its pages: looked up, prefetched, and waiting for room in L1.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use larder_base::runtime::after;
use larder_kernels::Ticket;

use super::error::{BeginError, Closed};
use super::queue::{Need, Place};
use super::sequence::{Cached, Sequence};
use super::shared::Shared;
use crate::cache::{Cache, CacheError};
use crate::core::{PrefetchId, PrefetchState};
use crate::prompt::{Prompt, Scope};

/// A prompt, with its properties for the cache.
#[derive(Clone, Debug)]
pub struct Ask<'t> {
    tokens: &'t [u64],
    scope: Scope,
    priority: i32,
    reserved: usize,
}

impl<'t> Ask<'t> {
    /// A prompt of these tokens.
    #[must_use]
    pub fn new(tokens: &'t [u64]) -> Ask<'t> {
        Ask {
            tokens,
            scope: Scope::default(),
            priority: 0,
            reserved: 0,
        }
    }

    /// Separates its pages from those of other tenants or adapters. Default: none.
    #[must_use]
    pub fn extra_key(mut self, key: &str) -> Ask<'t> {
        self.scope.extra_key = Some(key.to_owned());
        self
    }

    /// A secret, without which its pages are not found. Default: none.
    #[must_use]
    pub fn cache_salt(mut self, salt: &str) -> Ask<'t> {
        self.scope.cache_salt = Some(salt.to_owned());
        self
    }

    /// Its priority in the eviction order `priority`. Default: 0.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Ask<'t> {
        self.priority = priority;
        self
    }

    pub(crate) fn tokens(&self) -> &[u64] {
        self.tokens
    }

    pub(super) fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The same, with these tokens.
    pub(crate) fn with_tokens<'u>(&self, tokens: &'u [u64]) -> Ask<'u> {
        Ask {
            tokens,
            scope: self.scope.clone(),
            ..*self
        }
    }

    /// Number of tokens of the answer for which L1 must have room at the beginning, so that
    /// [`Sequence::push`] does not fail for them. With speculation: the answer and one draft. A
    /// truncation that cuts a shared page takes a page of them: reserve as many pages more as there
    /// may be of these, or share accepted tokens only. Default: 0.
    #[must_use]
    pub fn reserved(mut self, tokens: usize) -> Ask<'t> {
        self.reserved = tokens;
        self
    }
}

/// See the module documentation. A drop cancels the request.
#[must_use = "a dropped request is cancelled"]
pub struct Waiting {
    shared: Arc<Shared>,
    /// `None` after it has begun.
    prompt: Option<Arc<Prompt>>,
    /// Where its future waits.
    place: Option<Place>,
    /// Number of replacements of weights before its prefetch.
    weights: u64,
    tokens: usize,
    reserved: usize,
    priority: i32,
    prefetch: Option<PrefetchId>,
    /// Pages that the prefetch has brought.
    from_l3: usize,
    no_room: Option<(usize, usize)>,
}

/// The result of an attempt to begin.
#[expect(
    clippy::large_enum_variant,
    reason = "it is matched at once, never kept"
)]
pub enum Begin {
    /// The sequence has its cached pages and its slots.
    Ready(Sequence),
    /// Its pages have not arrived, or L1 has no room: try again later.
    Later(Waiting),
}

impl Waiting {
    pub(super) fn new(shared: Arc<Shared>, ask: &Ask<'_>) -> Result<Waiting, BeginError> {
        if ask.tokens.is_empty() {
            return Err(BeginError::Empty);
        }
        let slots = ask.tokens.len().saturating_add(ask.reserved);
        let pages = slots.div_ceil(shared.page_tokens());
        let (prompt, prefetch, weights) = shared.with(|cache| {
            let l1_pages = cache.core().config().l1_pages;
            if pages > l1_pages as usize {
                return Err(BeginError::TooLong { pages, l1_pages });
            }
            let mut prompt = cache.core().prompt(&ask.scope);
            cache.extend_or_cut(&mut prompt, ask.tokens);
            let prefetch = cache.prefetch(&mut prompt).ok();
            Ok((prompt, prefetch, cache.core().weights_replaced()))
        })??;
        Ok(Waiting {
            shared,
            prompt: Some(Arc::new(prompt)),
            place: None,
            weights,
            tokens: ask.tokens.len(),
            reserved: ask.reserved,
            priority: ask.priority,
            prefetch,
            from_l3: 0,
            no_room: None,
        })
    }

    /// The tokens of its prompt that are in L1 and in L2 now, pages of L3 that have arrived
    /// included. For the order of a batch: nothing holds them before it begins.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn cached(&self) -> Result<Cached, BeginError> {
        let prompt = self.prompt.as_ref().ok_or(BeginError::Begun)?;
        let pages = self.shared.with(|cache| cache.core().peek(prompt))?;
        let page_tokens = self.shared.page_tokens();
        let most = (self.tokens - 1) / page_tokens;
        let l1 = pages.0.min(most);
        Ok(Cached {
            l1: l1 * page_tokens,
            l2: pages.1.min(most - l1) * page_tokens,
            l3: 0,
        })
    }

    /// Begins if its pages have arrived, or if the configured time for them is over, and if L1 has
    /// room. Does not wait.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn try_begin(mut self) -> Result<Begin, BeginError> {
        self.shared.poll()?;
        Ok(match self.step(false)? {
            Some(sequence) => Begin::Ready(sequence),
            None => Begin::Later(self),
        })
    }

    /// Waits for its pages and for room, at most `wait`. Then it begins with the pages that have
    /// arrived.
    ///
    /// # Errors
    /// L1 has no room by then. Or the cache is closed.
    pub fn begin_within(mut self, wait: Duration) -> Result<Sequence, BeginError> {
        let deadline = after(wait);
        let shared = self.shared.clone();
        let begun = shared.wait(deadline, |cache, is_over| {
            self.step_in(cache, is_over).transpose()
        })?;
        let (pages, available) = self.no_room.unwrap_or_default();
        begun.unwrap_or(Err(BeginError::NoRoom { pages, available }))
    }

    /// What it waits for, if it has not begun.
    fn need(&self) -> Option<Need> {
        let prompt = self.prompt.clone()?;
        Some(match self.prefetch {
            Some(id) => Need::Prefetch(id),
            None => Need::Room {
                pages: (self.tokens + self.reserved).div_ceil(self.shared.page_tokens()),
                prompt,
            },
        })
    }

    /// Its future waits no longer.
    fn leave(&mut self) {
        if let Some(place) = self.place.take() {
            self.shared.leave(place);
        }
    }

    fn step(&mut self, is_over: bool) -> Result<Option<Sequence>, BeginError> {
        let shared = self.shared.clone();
        shared.with(|cache| self.step_in(cache, is_over))?
    }

    /// Begins if it can. With `is_over`, it waits no longer for its prefetch.
    fn step_in(
        &mut self,
        cache: &mut Cache,
        is_over: bool,
    ) -> Result<Option<Sequence>, BeginError> {
        self.renew(cache);
        if let Some(id) = self.prefetch {
            let state = if is_over {
                cache.end_prefetch(id)
            } else {
                match cache.poll_prefetch(id) {
                    Err(CacheError::Ranks(failure)) => return Err(Closed::from(failure).into()),
                    state => state.unwrap_or(PrefetchState::Unknown),
                }
            };
            match state {
                PrefetchState::Waiting => return Ok(None),
                PrefetchState::Ended(pages) => self.from_l3 = pages,
                PrefetchState::Declined(_) | PrefetchState::Unknown => {}
            }
            self.prefetch = None;
        }
        self.start(cache)
    }

    /// Looks its prompt up again after its weights were replaced.
    fn renew(&mut self, cache: &mut Cache) {
        let weights = cache.core().weights_replaced();
        let Some(prompt) = self.prompt.as_ref().filter(|_| weights != self.weights) else {
            return;
        };
        let mut prompt = Prompt::clone(prompt);
        if let Some(former) = self.prefetch.take() {
            cache.cancel_prefetch(former);
        }
        self.weights = weights;
        self.from_l3 = 0;
        self.prefetch = cache.prefetch(&mut prompt).ok();
        self.prompt = Some(Arc::new(prompt));
    }

    /// Takes the cached pages and the slots. Without room it takes nothing.
    fn start(&mut self, cache: &mut Cache) -> Result<Option<Sequence>, BeginError> {
        let page_tokens = self.shared.page_tokens();
        let prompt = self.prompt.as_ref().ok_or(BeginError::Begun)?;
        let slots = self.tokens + self.reserved;
        let room = |cache: &Cache, in_l1: usize| {
            let pages = slots.div_ceil(page_tokens) - in_l1;
            (pages, cache.core().available_pages())
        };
        // Most attempts without room end here, before they count as requests.
        let in_l1 = cache.match_prefix(prompt).l1.pages() as usize;
        let (pages, available) = room(cache, in_l1);
        if pages > available {
            self.no_room = Some((pages, available));
            return Ok(None);
        }
        let mut request = cache.start(Prompt::clone(prompt), self.priority);
        // The pages that it has matched cannot be evicted any more.
        let in_l1 = request.tokens();
        let (pages, available) = room(cache, in_l1 / page_tokens);
        let loaded = if pages > available {
            None
        } else {
            match cache.load_back(&mut request, usize::MAX) {
                Ok(_) => Some((request.tokens() - in_l1) / page_tokens),
                // Pages that it has matched were just lost: the next attempt does not match them.
                Err(_) => None,
            }
        };
        let missing = slots - request.tokens();
        let loaded = loaded.filter(|_| cache.extend(&mut request, missing).is_ok());
        let Some(loaded) = loaded else {
            cache.finish(request, false, &Ticket::done());
            self.no_room = Some((pages, available));
            return Ok(None);
        };
        let from_l3 = self.from_l3.min(loaded);
        let cached = Cached {
            l1: in_l1,
            l2: (loaded - from_l3) * page_tokens,
            l3: from_l3 * page_tokens,
        };
        self.prompt = None;
        let sequence = Sequence::new(self.shared.clone(), cache, request, cached, self.tokens);
        Ok(Some(sequence))
    }
}

/// Becomes ready when the request has begun.
impl Future for Waiting {
    type Output = Result<Sequence, BeginError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let shared = self.shared.clone();
        let step = shared.with(|cache| {
            let step = self.step_in(cache, false);
            // Progress comes with the cache, which is held until the request waits.
            if matches!(step, Ok(None)) {
                let waker = context.waker();
                self.place = self.need().map(|need| {
                    let mut queue = shared.queue();
                    queue.wait(self.place, need, waker)
                });
            }
            step
        });
        match step.unwrap_or_else(|closed| Err(closed.into())) {
            Ok(Some(sequence)) => {
                self.leave();
                Poll::Ready(Ok(sequence))
            }
            Ok(None) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.leave();
        if let Some(id) = self.prefetch {
            // After the end of the cache there is nothing to cancel.
            let _closed = self.shared.with_any(|cache| cache.cancel_prefetch(id));
        }
    }
}
