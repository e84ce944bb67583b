//! One page of a tail pool, in L1 and in L2.

use larder_format::PageKey;

use crate::tree::LoadId;

/// Number of an entry. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TailId(pub(super) u64);

/// The receipt of a hold.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a hold that is not released keeps its page for ever"]
pub struct Hold {
    pub(super) id: TailId,
    /// The page of L1; `None` if the page of L2 is held.
    pub(super) page: Option<u32>,
}

impl Hold {
    /// The entry.
    #[must_use]
    pub fn id(&self) -> TailId {
        self.id
    }

    /// The held page of L1.
    #[must_use]
    pub fn page(&self) -> Option<u32> {
        self.page
    }
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: PageKey,
    pub(super) l1: Option<u32>,
    pub(super) l2: Option<u32>,
    /// Holds of the page of L1, with which that of L2 stays; and of the page of L2.
    pub(super) l1_holds: u32,
    pub(super) l2_holds: u32,
    /// The forward that writes the page of L1 has not ended.
    pub(super) is_pending: bool,
    /// The load that fills the page of L1.
    pub(super) loading: Option<LoadId>,
    pub(super) is_backing_up: bool,
    pub(super) is_putting: bool,
    pub(super) is_in_l3: bool,
    /// The last use.
    pub(super) used: u64,
}

impl Entry {
    pub(super) fn new(key: PageKey) -> Entry {
        Entry {
            key,
            l1: None,
            l2: None,
            l1_holds: 0,
            l2_holds: 0,
            is_pending: false,
            loading: None,
            is_backing_up: false,
            is_putting: false,
            is_in_l3: false,
            used: 0,
        }
    }

    pub(super) fn hold(&mut self, id: TailId) -> Hold {
        match self.l1 {
            Some(_) => self.l1_holds += 1,
            None => self.l2_holds += 1,
        }
        Hold { id, page: self.l1 }
    }

    pub(super) fn hold_l2(&mut self, id: TailId) -> Hold {
        self.l2_holds += 1;
        Hold { id, page: None }
    }

    #[expect(clippy::needless_pass_by_value, reason = "a receipt is used up")]
    pub(super) fn release(&mut self, hold: Hold) {
        let holds = match hold.page {
            Some(_) => &mut self.l1_holds,
            None => &mut self.l2_holds,
        };
        *holds = holds.checked_sub(1).expect("a hold is released once");
    }

    /// The page of L1 leaves with its holds.
    pub(super) fn lose(&mut self) -> Option<u32> {
        self.l1_holds = 0;
        self.is_pending = false;
        self.loading = None;
        self.l1.take()
    }

    pub(super) fn is_settled(&self) -> bool {
        !self.is_pending && self.loading.is_none()
    }

    pub(super) fn may_leave_l1(&self) -> bool {
        self.l1.is_some() && self.l1_holds == 0 && self.is_settled()
    }

    pub(super) fn may_leave_l2(&self) -> bool {
        self.l2.is_some() && self.l2_holds == 0 && self.l1_holds == 0 && self.is_settled()
    }

    pub(super) fn wants_backup(&self) -> bool {
        self.is_settled() && self.l2.is_none() && !self.is_backing_up
    }

    pub(super) fn wants_put(&self) -> bool {
        self.l2.is_some() && !self.is_in_l3 && !self.is_putting
    }

    pub(super) fn digest(&self) -> u64 {
        let state = [
            u64::from(self.l1.is_some()),
            u64::from(self.l2.is_some()),
            u64::from(self.l1_holds),
            u64::from(self.l2_holds),
            u64::from(self.is_pending),
            u64::from(self.loading.is_some()),
            u64::from(self.is_backing_up),
            u64::from(self.is_putting),
            u64::from(self.is_in_l3),
            self.used,
        ];
        let first = self.key.as_bytes().first_chunk().copied();
        let key = u64::from_le_bytes(first.unwrap_or_default());
        state.iter().fold(key, |sum, value| {
            (sum ^ value)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
        })
    }
}
