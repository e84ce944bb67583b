//! The status of a page in the answers of the faces: one byte a page.
//!
//! 0 and 1 are success. The codes are part of the interfaces (`larder_kv.Status`, `larder.h`) and
//! never change.

use larder_engine::{GetStatus, MissReason, PutFailure, PutStatus, Refusal};

use crate::named::named;

named! {
    /// The status of a page.
    Status {
        /// Read and verified, stored, found or leased.
        Ok = 0 => "OK",
        /// Put: stored before.
        Duplicate = 1 => "DUPLICATE",
        /// Not in the store.
        Absent = 2 => "ABSENT",
        /// Its bytes failed their checksum.
        Damaged = 3 => "DAMAGED",
        /// The last crash cut its write short.
        Unfinished = 4 => "UNFINISHED",
        /// The device failed the read.
        ReadError = 5 => "READ_ERROR",
        /// The deadline passed first.
        Deadline = 6 => "DEADLINE",
        /// The volume has not answered for longer than the hang limit.
        Hung = 7 => "HUNG",
        /// A read-only handle read it while its segment was reused.
        Stale = 8 => "STALE",
        /// Its memory does not have the namespace's shape.
        WrongShape = 9 => "WRONG_SHAPE",
        /// The store is closed, or has no owner now.
        Closed = 10 => "CLOSED",
        /// Put: no room now.
        NoSpace = 11 => "NO_SPACE",
        /// Put: too many bytes of writes are in flight.
        Busy = 12 => "BUSY",
        /// Put: it fits no segment.
        TooLarge = 13 => "TOO_LARGE",
        /// Put: its chain is longer than all that the store keeps.
        Unreachable = 14 => "UNREACHABLE",
        /// Put: the store was opened read-only.
        ReadOnly = 15 => "READ_ONLY",
        /// Put: the serial numbers of this run are used up.
        Exhausted = 16 => "EXHAUSTED",
        /// Put: every volume is in read-only service.
        ReadOnlyService = 17 => "READ_ONLY_SERVICE",
        /// Put: the device refused the write.
        WriteFailed = 18 => "WRITE_FAILED",
        /// Put: the device refused the sync.
        SyncFailed = 19 => "SYNC_FAILED",
        /// Lease: the share of the store that may be leased is used up.
        Refused = 20 => "REFUSED",
        /// Another reason, which this release does not name.
        Other = 21 => "OTHER",
        /// Put: the store's policy of admission does not take it.
        NotAdmitted = 22 => "NOT_ADMITTED",
        /// Put: the budget of writes does not take it.
        Budget = 23 => "BUDGET",
        /// Put: its group is at the maximum of its quota.
        Quota = 24 => "QUOTA",
        /// Put: its tenant is being erased.
        Erased = 25 => "ERASED",
        /// Put: its tenant is new, and the keyring takes no more tenants.
        KeyringFull = 26 => "KEYRING_FULL",
    }
}

impl Status {
    /// Whether the page is there.
    #[must_use]
    pub fn is_success(self) -> bool {
        matches!(self, Status::Ok | Status::Duplicate)
    }
}

impl From<GetStatus> for Status {
    fn from(status: GetStatus) -> Status {
        match status {
            GetStatus::Hit => Status::Ok,
            GetStatus::Miss(why) => why.into(),
        }
    }
}

impl From<MissReason> for Status {
    fn from(why: MissReason) -> Status {
        match why {
            MissReason::Absent | MissReason::Sealed => Status::Absent,
            MissReason::Damaged | MissReason::Undecodable => Status::Damaged,
            MissReason::Unfinished => Status::Unfinished,
            MissReason::ReadError => Status::ReadError,
            MissReason::Deadline => Status::Deadline,
            MissReason::Hung => Status::Hung,
            MissReason::Stale => Status::Stale,
            MissReason::WrongShape => Status::WrongShape,
            MissReason::Closed => Status::Closed,
        }
    }
}

impl From<PutStatus> for Status {
    fn from(status: PutStatus) -> Status {
        match status {
            PutStatus::Stored => Status::Ok,
            PutStatus::Duplicate => Status::Duplicate,
            PutStatus::Refused(why) => why.into(),
            PutStatus::Failed(PutFailure::Write) => Status::WriteFailed,
            PutStatus::Failed(PutFailure::Sync) => Status::SyncFailed,
        }
    }
}

impl From<Refusal> for Status {
    fn from(why: Refusal) -> Status {
        match why {
            Refusal::NoSpace => Status::NoSpace,
            Refusal::Busy => Status::Busy,
            Refusal::WrongShape => Status::WrongShape,
            Refusal::TooLarge => Status::TooLarge,
            Refusal::Unreachable => Status::Unreachable,
            Refusal::ReadOnly => Status::ReadOnly,
            Refusal::Closed => Status::Closed,
            Refusal::Exhausted => Status::Exhausted,
            Refusal::ReadOnlyService => Status::ReadOnlyService,
            Refusal::NotAdmitted => Status::NotAdmitted,
            Refusal::Budget => Status::Budget,
            Refusal::Quota => Status::Quota,
            Refusal::Erased => Status::Erased,
            Refusal::KeyringFull => Status::KeyringFull,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_those_of_the_interface() {
        for ((_, status), code) in Status::NAMES.into_iter().zip(0..) {
            assert_eq!(status as u8, code);
        }
        assert!(Status::from(PutStatus::Duplicate).is_success());
        assert!(!Status::from(GetStatus::Miss(MissReason::Absent)).is_success());
    }
}
