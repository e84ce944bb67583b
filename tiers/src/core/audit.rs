//! The invariant of the core: every page has one owner, and every lock has a holder.

use super::flight::Prefetch;
use super::side::OfPool;
use super::{Core, Request, RequestId};
use crate::runs::{L1, L2, Run, Runs, Tier};
use crate::tree::{Flaw, claim};

/// A violated invariant of a core.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Leak {
    /// The tree violates an invariant.
    #[error("{0}")]
    Tree(#[from] Flaw),
    /// A page with an owner is free, or a page without an owner is not free.
    #[error(
        "page {page} of {tier} is {}",
        if *.is_owned { "owned and free" } else { "neither owned nor free" }
    )]
    Page {
        /// The pool.
        tier: &'static str,
        /// The page.
        page: u32,
        /// Whether the page has an owner.
        is_owned: bool,
    },
    /// A page has two owners, or does not exist in its pool.
    #[error("{holder}: {what}")]
    Owner {
        /// The owner.
        holder: &'static str,
        /// The problem.
        what: &'static str,
    },
    /// The number of locks in the tree differs from the number of locks at their holders.
    #[error("the tree counts {found:?} locks (L1, L2), the holders {expected:?}")]
    Locks {
        /// Locks counted in the tree (L1, L2).
        found: (u32, u32),
        /// Locks counted at their holders (L1, L2).
        expected: (u32, u32),
    },
    /// A request is marked as broken but does not run.
    #[error("request {} is broken and does not run", .0.0)]
    Request(RequestId),
    /// A running total is wrong.
    #[error("{what} adds up to {expected}, not {found}")]
    Total {
        /// The total.
        what: &'static str,
        /// The stored total.
        found: usize,
        /// The computed sum.
        expected: usize,
    },
}

impl Core {
    /// Checks the invariants of the core and its tree. The time grows with the pools. `requests`
    /// are the running requests.
    ///
    /// # Errors
    /// The first violation found.
    pub fn validate<'r>(
        &self,
        requests: impl IntoIterator<Item = &'r Request>,
    ) -> Result<(), Leak> {
        self.tree.validate()?;
        let mut l1 = vec![false; self.l1.pages() as usize + 1];
        let mut l2 = vec![false; self.l2.pages() as usize + 1];
        self.tree.claim_pages(&mut l1, &mut l2)?;
        let (mut l1_locks, mut l2_locks) = self.flight_locks();
        let mut broken = self.broken.clone();
        let requests: Vec<&Request> = requests.into_iter().collect();
        for request in &requests {
            broken.remove(&request.id());
            own(
                &Runs::<L1>::of_pages(request.own_pages()),
                &mut l1,
                "a request",
            )?;
            let (of_l1, of_l2) = request.locks();
            l1_locks += of_l1;
            l2_locks += of_l2;
        }
        for pages in self.tree.lost_pages() {
            own(pages, &mut l1, "a loss")?;
        }
        if let Some(request) = broken.first() {
            return Err(Leak::Request(*request));
        }
        for pages in self.flight_l2() {
            own(pages, &mut l2, "a backup")?;
        }
        for prefetch in self.prefetches.values() {
            l2_locks += u32::from(prefetch.holds_anchor());
            if let Some(pages) = prefetch.l2() {
                own(pages, &mut l2, "a prefetch")?;
            }
        }
        check_pool("L1", &l1, |page| self.l1.is_free(page))?;
        check_pool("L2", &l2, |page| self.l2.is_free(page))?;
        self.check_tails(&requests)?;
        let (found, expected) = (self.tree.locks_out(), (l1_locks, l2_locks));
        if found != expected {
            return Err(Leak::Locks { found, expected });
        }
        self.check_totals()
    }

    fn check_tails(&self, requests: &[&Request]) -> Result<(), Leak> {
        for (number, tail) in self.tails.iter().enumerate() {
            let pool = &tail.pool;
            let mut l1 = vec![false; pool.pages().0 as usize + 1];
            let mut l2 = vec![false; pool.pages().1 as usize + 1];
            pool.claim_pages(&mut l1, &mut l2)?;
            let mut holds = self.tail_flight_holds(number);
            let of_pool = |holds: &mut dyn Iterator<Item = usize>| {
                u32::try_from(holds.filter(|of| *of == number).count()).unwrap_or(u32::MAX)
            };
            for tails in requests.iter().filter_map(|request| request.tails.as_ref()) {
                let pages = tails.pools.get(number).map(OfPool::own_pages);
                let pages = pages_of::<L1>(pages.unwrap_or_default());
                own(&pages, &mut l1, "a request")?;
                holds += of_pool(&mut tails.holds().map(|(of, _)| of));
                holds += of_pool(&mut tails.wished_holds().map(|(of, _)| of));
            }
            own(
                &pages_of::<L2>(self.tail_flights(number)),
                &mut l2,
                "a backup",
            )?;
            for prefetch in self.prefetches.values() {
                let read = prefetch.tails().iter().filter(|of| of.pool == number);
                own(&pages_of::<L2>(read.map(|of| of.l2)), &mut l2, "a prefetch")?;
                let held = prefetch.claim.iter().flat_map(|claim| &claim.tails);
                holds += of_pool(&mut held.map(|(of, _)| *of));
            }
            check_pool("L1 of a tail pool", &l1, |page| pool.is_free(page).0)?;
            check_pool("L2 of a tail pool", &l2, |page| pool.is_free(page).1)?;
            if pool.holds() != holds {
                return Err(Leak::Locks {
                    found: (pool.holds(), 0),
                    expected: (holds, 0),
                });
            }
        }
        Ok(())
    }

    fn check_totals(&self) -> Result<(), Leak> {
        let wanted = self.prefetches.values().map(Prefetch::wanted).sum();
        let totals = [
            ("pages wanted by prefetches", self.prefetch_pages, wanted),
            ("pages queued for L3", self.put_pages, self.put_pages_out()),
            ("loads in flight", self.loads, self.loads_out()),
            (
                "pages whose forward has not ended",
                self.tree.pending_pages(),
                self.pages_pending(),
            ),
        ];
        match totals
            .into_iter()
            .find(|(_, found, expected)| found != expected)
        {
            None => Ok(()),
            Some((what, found, expected)) => Err(Leak::Total {
                what,
                found,
                expected,
            }),
        }
    }
}

fn pages_of<T: Tier>(pages: impl IntoIterator<Item = u32>) -> Runs<T> {
    let runs = pages.into_iter().map(|page| Run::new(page, 1));
    runs.collect()
}

fn own<T: Tier>(pages: &Runs<T>, table: &mut [bool], holder: &'static str) -> Result<(), Leak> {
    claim(pages, table).map_err(|what| Leak::Owner { holder, what })
}

fn check_pool(
    tier: &'static str,
    owned: &[bool],
    is_free: impl Fn(u32) -> bool,
) -> Result<(), Leak> {
    let mut numbered = (0u32..).zip(owned).skip(1);
    match numbered.find(|(page, owned)| is_free(*page) == **owned) {
        None => Ok(()),
        Some((page, &is_owned)) => Err(Leak::Page {
            tier,
            page,
            is_owned,
        }),
    }
}
