//! The invariant of the core: every page has one owner, and every lock has a holder.

use super::flight::Prefetch;
use super::{Core, Request, RequestId};
use crate::runs::{L1, Runs, Tier};
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
        for request in requests {
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
        let (found, expected) = (self.tree.locks_out(), (l1_locks, l2_locks));
        if found != expected {
            return Err(Leak::Locks { found, expected });
        }
        self.check_totals()
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
