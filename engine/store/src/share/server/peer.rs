//! Whether the process behind a connection may be a client.
//!
//! Judged by the user and the groups that the kernel attests (`SO_PEERCRED`, `SO_PEERGROUPS`), as
//! numbers of this process's user namespace. The pid is not looked at: that of a process in another
//! pid namespace is zero.
//!
//! An id that this user namespace does not map reads as the overflow id (65534, `nobody`), so that
//! all unmapped users look alike. Such a peer is denied, unless every id is mapped and 65534 can
//! only be the real `nobody`.

use larder_base::system::processes::{self, IdKind};
use larder_base::system::sockets::{self, UnixStream};

use crate::share::wire::Denial;

/// User or group id that stands for all unmapped ones, unless `/proc` has another.
const OVERFLOW_ID: u32 = 65_534;

/// The ids of one kind that this process's user namespace maps.
pub(in crate::share) struct IdMap {
    /// First id and count of each range. Where the kernel has no user namespaces every id is
    /// mapped.
    ranges: Vec<(u32, u32)>,
    overflow: u32,
}

impl IdMap {
    pub(in crate::share) fn of(kind: IdKind) -> IdMap {
        let (map, overflow) = processes::id_map(kind);
        IdMap {
            ranges: map.map_or_else(|| vec![(0, u32::MAX)], |text| ranges(&text)),
            overflow: overflow.unwrap_or(OVERFLOW_ID),
        }
    }

    /// Whether an id that the kernel reports may stand for an unmapped one.
    pub(in crate::share) fn hides(&self, id: u32) -> bool {
        let maps_all = self.ranges.contains(&(0, u32::MAX));
        id == self.overflow && !maps_all
    }

    /// Whether an id is mapped here.
    pub(in crate::share) fn has(&self, id: u32) -> bool {
        let mut ranges = self.ranges.iter();
        ranges.any(|&(first, count)| id.checked_sub(first).is_some_and(|at| at < count))
    }
}

/// Whether this process's own user is not mapped in its user namespace. Then it cannot tell
/// unmapped users apart.
pub(in crate::share) fn hides_own_user() -> bool {
    IdMap::of(IdKind::User).hides(processes::user())
}

/// The ranges of a `uid_map` or `gid_map`: first id inside, first id outside, count.
fn ranges(map: &str) -> Vec<(u32, u32)> {
    let range = |line: &str| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse);
        let (first, _, count) = (numbers.next()?, numbers.next()?, numbers.next()?);
        Some((first.ok()?, count.ok()?))
    };
    map.lines().filter_map(range).collect()
}

/// The users and the group that an owner serves.
pub(super) struct Admission {
    /// The user that the store belongs to; `None` when that user is not mapped here.
    store: Option<u32>,
    /// The user of this process.
    own: u32,
    group: Option<u32>,
    users: IdMap,
    groups: IdMap,
}

impl Admission {
    /// For a store with volumes of user `store`, and optionally the members of a group.
    pub(super) fn new(store: u32, group: Option<u32>) -> Admission {
        let users = IdMap::of(IdKind::User);
        Admission {
            store: Some(store).filter(|uid| !users.hides(*uid)),
            own: processes::user(),
            group,
            users,
            groups: IdMap::of(IdKind::Group),
        }
    }

    /// The user that becomes the socket's owner.
    pub(super) fn store_user(&self) -> Option<u32> {
        self.store
    }

    /// Admits the peer of a connection as a client.
    pub(super) fn admit(&self, peer: &UnixStream) -> Result<(), Denial> {
        let found = sockets::peer(peer).map_err(|error| Denial::NotAttested {
            reason: error.to_string(),
        })?;
        let groups = || {
            let further = sockets::further_groups(peer).unwrap_or_default();
            further.into_iter().chain([found.group]).collect()
        };
        self.judge(found.user, groups)
    }

    fn judge(&self, uid: u32, groups: impl FnOnce() -> Vec<u32>) -> Result<(), Denial> {
        if self.users.hides(uid) {
            return Err(Denial::Unmapped { uid });
        }
        if uid == 0 || uid == self.own || self.store == Some(uid) {
            return Ok(());
        }
        let group = self.group.filter(|gid| !self.groups.hides(*gid));
        if group.is_some_and(|gid| groups().contains(&gid)) {
            return Ok(());
        }
        Err(Denial::User {
            uid,
            store: self.store.unwrap_or(self.own),
            group: self.group,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn map(text: &str) -> IdMap {
        IdMap {
            ranges: ranges(text),
            overflow: OVERFLOW_ID,
        }
    }

    fn admission(map_text: &str) -> Admission {
        Admission {
            store: Some(1000),
            own: 2000,
            group: Some(70),
            users: map(map_text),
            groups: map(map_text),
        }
    }

    const ALL: &str = "         0          0 4294967295\n";

    #[test]
    fn the_overflow_id_is_a_real_user_only_where_every_id_is_mapped() {
        let cases = [
            (ALL, false),
            ("0 100000 65536\n", true),
            ("0 1000 1\n65534 65534 1\n", true),
            ("", true),
        ];
        for (text, hides) in cases {
            assert_eq!(map(text).hides(OVERFLOW_ID), hides, "{text}");
            assert!(!map(text).hides(0));
        }
    }

    #[test]
    fn an_id_can_be_named_within_the_ranges_of_the_map() {
        let map = map("0 100000 10\n50 7 1\n");
        let named = [0, 9, 10, 49, 50, 51].map(|id| map.has(id));
        assert_eq!(named, [true, true, false, false, true, false]);
    }

    #[test]
    fn the_stores_user_the_owners_user_root_and_members_of_the_group_are_admitted() {
        let admission = admission(ALL);
        for uid in [0, 1000, 2000] {
            assert_eq!(admission.judge(uid, || panic!("no need to look")), Ok(()));
        }
        assert_eq!(admission.judge(3000, || vec![5, 70]), Ok(()));
        assert_eq!(admission.judge(OVERFLOW_ID, || vec![70]), Ok(()));
        let denied = Denial::User {
            uid: 3000,
            store: 1000,
            group: Some(70),
        };
        assert_eq!(admission.judge(3000, || vec![5, 71]), Err(denied));
    }

    #[test]
    fn a_user_that_is_not_mapped_is_denied_in_any_group() {
        let admission = admission("0 100000 65536\n");
        let denied = Denial::Unmapped { uid: OVERFLOW_ID };
        assert_eq!(admission.judge(OVERFLOW_ID, || vec![70]), Err(denied));
    }

    #[test]
    fn a_process_of_the_owners_user_is_admitted_by_its_connection() {
        let (peer, _other) = UnixStream::pair().unwrap();
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(Admission::new(own, None).admit(&peer), Ok(()));
    }
}
