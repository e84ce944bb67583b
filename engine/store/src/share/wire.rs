//! The protocol between owner and clients: framed messages over a Unix stream socket.
//!
//! A frame is a length (`u32`, little-endian, at most [`FRAME_BYTES_MAX`]) and that many bytes: one
//! [`Request`] or one [`Reply`] in postcard's encoding. A connection begins with
//! [`Request::Hello`] or [`Request::Join`]. Keys travel as one blob, 32 bytes each, and are read in
//! place. [`protocol`](crate::protocol) has the rule by which messages may change; a new message is
//! appended to its enum.
//!
//! Faults defended against: lengths beyond the limit, frames that end early, bytes that are no
//! message or more than one message, key blobs of odd length, lists of more than [`KEYS_MAX`]
//! elements (which may take forty times their bytes in memory). Each is an error of that one
//! connection; no unchecked number determines an allocation.

mod frames;
mod pages;
mod report;

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU16;

use larder_base::ids::ClientId;
use larder_core::core::Kept;
use larder_core::grants::Finding;
use larder_core::hint::Hint;
use larder_core::index::{Leased, Place, ReadAs, SegmentId};
use larder_core::status::{PutStatus, Refusal};
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::encoder::CodecChoice;
use crate::keys::KeyUse;
use crate::protocol::Protocol;
use crate::quotas::{QuotaChange, QuotaReport};
use crate::staging::SlotEnd;
use crate::totals::{Measures, Totals};
use crate::traffic::{Salt, Taken};
pub(super) use frames::arrives;
pub use frames::{WireError, parse, parse_greeting, receive, send};
pub use pages::{PageProof, PinnedPage, StagedPage};
pub use report::{
    AnsweringVolume, DamagedVolume, DisplacedVolume, EndedClient, Erasure, Keyholder, ReleaseCount,
    Report, StoppedClient, VolumeDamage, VolumeState,
};

/// First bytes of a greeting.
pub const MAGIC: [u8; 8] = *b"LARDERCT";

/// Longest frame, in bytes: [`KEYS_MAX`] encrypted pages to read, with room to spare.
pub const FRAME_BYTES_MAX: usize = 12 << 20;

/// Most keys of one message.
pub const KEYS_MAX: usize = 131_072;

/// Bytes of a key.
pub(super) const KEY_BYTES: usize = 32;

/// A client's request. Requests marked *no reply* are not answered.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request<'a> {
    /// Begins a client's first connection, whose end is the client's end. The rest of the frame is
    /// ignored.
    Hello {
        magic: [u8; 8],
        protocol: Protocol,
    },
    /// Begins a further connection of a client, with the protocol of its first one.
    Join {
        magic: [u8; 8],
        client: ClientId,
        secret: u64,
    },
    /// The client holds its marks on the volumes, and may write from now on.
    Marked,
    /// The record of a namespace.
    Namespace {
        #[serde(borrow, with = "serde_bytes")]
        record: &'a [u8],
    },
    LongestPrefix {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    Contains {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    /// No reply.
    Touch {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    Pin {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        read_as: ReadAs,
    },
    /// No reply. The segments of pages that were pinned, one per page.
    Unpin {
        #[serde(deserialize_with = "few")]
        segments: Vec<SegmentId>,
    },
    /// No reply.
    Verified {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        #[serde(deserialize_with = "few")]
        findings: Vec<(Place, Finding)>,
    },
    /// One link per key.
    Reserve {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        #[serde(deserialize_with = "few")]
        links: Vec<Link>,
    },
    /// No reply.
    Commit {
        reservation: u64,
        #[serde(deserialize_with = "few")]
        proofs: Vec<Option<PageProof>>,
    },
    /// No reply.
    Landed {
        #[serde(deserialize_with = "few")]
        puts: Vec<LandedPut>,
    },
    /// Answered when every page of these reservations is settled. Each reservation is named once,
    /// with at most [`KEYS_MAX`] pages in all.
    Wait {
        #[serde(deserialize_with = "few")]
        reservations: Vec<u64>,
    },
    Room,
    /// Answered when the room is no longer `seen`, or after `patience_ms`.
    WaitForRoom {
        seen: u64,
        patience_ms: u32,
    },
    Delete {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    Clear {
        namespace: u16,
    },
    Flush,
    Stats,
    /// The staging area. Answered with [`Reply::Area`] and the area's file attached, or with
    /// [`Reply::Done`] when there is none.
    Area,
    /// Like `Pin`, and returns for each shared page the slot to read it into or to copy it from.
    Stage {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    /// No reply. Releases the result of `Stage`: the segments, one per page, and the slots.
    Unstage {
        segments: Vec<SegmentId>,
        slots: Vec<SlotEnd>,
    },
    /// Takes counted leases.
    Lease {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    /// Returns counted leases.
    Unlease {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    Usage,
    /// The pages that the store evicted by itself; zero begins.
    Evictions {
        since: u64,
    },
    /// Some pages of a namespace; zero begins.
    List {
        namespace: u16,
        cursor: u64,
    },
    /// No reply. The name of the client's program, and its counters since it attached. Sent to an
    /// owner with the feature [`COUNTS`](crate::protocol::COUNTS) alone.
    Counted {
        name: &'a str,
        #[serde(deserialize_with = "few")]
        counts: Vec<u64>,
    },
    /// `Touch` with a hint. For an owner with the feature [`POLICIES`](crate::protocol::POLICIES).
    TouchHinted {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        hint: Hint,
    },
    /// `Reserve` with a hint. For such an owner.
    ReserveHinted {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        #[serde(deserialize_with = "few")]
        links: Vec<Link>,
        hint: Hint,
    },
    /// For each key whether it is stored. Changes nothing.
    Peek {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
    },
    /// The memory that the processes of the store share: pacing, and how the volumes answer.
    /// Answered with [`Reply::Common`] and its file attached, or with [`Reply::Done`] when there is
    /// none. For an owner with the feature [`COMMON`](crate::protocol::COMMON).
    Common,
    /// The namespaces whose records are known.
    Records,
    /// No reply. The latencies of the client since it attached, and its reads by namespace, as
    /// JSON. Sent to an owner with the feature [`TOTALS`](crate::protocol::TOTALS) alone.
    Measured(#[serde(with = "by_name")] Box<Measures>),
    /// No reply. The client asks for the ownership. Sent to an owner with the feature
    /// [`HEIRS`](crate::protocol::HEIRS) alone.
    Own,
    /// Moves all pages out of a segment, in the order of their first blocks in `starts`, if it is
    /// still of this generation.
    Empty {
        volume: u16,
        segment: u32,
        sequence: u64,
        #[serde(deserialize_with = "few")]
        starts: Vec<u32>,
    },
    /// Waits until these pages have arrived from beneath the store. Answered with [`Reply::Count`]:
    /// 1 if some are stored then, else 0; or with [`Reply::Done`] if nothing lies beneath. Sent to
    /// an owner with the feature [`BENEATH`](crate::protocol::BENEATH) alone.
    Arrive {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        patience_ms: u32,
    },
    /// Ends or resumes the work of the place beneath the store. Answered with [`Reply::Count`]: 1
    /// if there is one, else 0.
    UseBeneath {
        is_used: bool,
    },
    /// Takes the calls of all processes since the last question; the first one begins a recording,
    /// which ends with the asker. Keys are hashed with the salt. For an owner with the feature
    /// [`TRAFFIC`](crate::protocol::TRAFFIC).
    Record {
        salt: Salt,
    },
    /// Changes the quotas, or asks for them. As JSON. Answered with [`Reply::Quotas`].
    Quotas(#[serde(with = "by_name")] Box<QuotaChange>),
    /// Pins pages until a time, in seconds since 1970; 0 takes pins back. Answered with
    /// [`Reply::Kept`].
    Keep {
        namespace: u16,
        #[serde(borrow, with = "serde_bytes")]
        keys: &'a [u8],
        until_unix_s: u32,
    },
    /// The pinned pages behind the first `from`, in the order of their ends. Answered with
    /// [`Reply::KeptPages`].
    KeptPages {
        from: u32,
    },
    /// The keys of a namespace's tenant, in an encrypted store. A new tenant gets one if pages are
    /// to be put. Answered with [`Reply::Keys`], or with [`Reply::Keyless`].
    Keys {
        namespace: u16,
        use_of: KeyUse,
    },
    /// No reply. The keys that this [`Reply::Forget`] named are gone.
    Forgotten {
        number: u64,
    },
    /// Erases a tenant of an encrypted store, and waits for its clients, at most so long. Answered
    /// with [`Reply::Erased`].
    Erase {
        tenant: &'a str,
        patience_ms: u32,
    },
}

/// The slots of the keys of a tenant that a client gets.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LentSlots {
    /// The first is for new pages.
    pub has_current: bool,
    #[serde(deserialize_with = "few")]
    pub slots: Vec<NonZeroU16>,
    /// After an erasure of the tenant: pages that were made until then are refused. Else 0.
    pub erased_until: u64,
}

/// A key inside a message.
pub type PageKeyBytes = [u8; KEY_BYTES];

/// A page of a reservation, besides its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    pub parent: Option<PageKeyBytes>,
    pub depth: u32,
    /// See [`Ask`](larder_core::grants::Ask).
    pub saved: u32,
}

/// The first 96 bits of a key inside a message.
pub type PrefixBytes = [u8; 12];

/// A namespace's fingerprint inside a message.
pub type DigestBytes = [u8; 16];

/// The owner's reply.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    Welcome(Welcome),
    Done,
    Count(u64),
    Flags(#[serde(deserialize_with = "few")] Vec<bool>),
    /// Its number, whether puts into it encode pages, and its name in the store.
    Namespace(u16, CodecChoice, DigestBytes),
    Pinned(#[serde(deserialize_with = "few")] Vec<Option<PinnedPage>>),
    Reserved {
        reservation: u64,
        #[serde(deserialize_with = "few")]
        grants: Vec<PlaceGrant>,
    },
    /// One status per page, reservation by reservation.
    Settled(#[serde(deserialize_with = "few")] Vec<PutStatus>),
    Room {
        room: u64,
    },
    /// As JSON.
    Stats(#[serde(with = "by_name")] Box<Report>),
    /// The request failed.
    Failed(Failure),
    /// Comes with a file descriptor.
    Area,
    Staged {
        /// Other processes use the namespace too.
        shared: bool,
        pages: Vec<Option<StagedPage>>,
    },
    Leased(#[serde(deserialize_with = "few")] Vec<Leased>),
    Listed {
        #[serde(deserialize_with = "few")]
        keys: Vec<PageKeyBytes>,
        next: Option<u64>,
    },
    Evicted {
        next: u64,
        missed: bool,
        #[serde(deserialize_with = "few")]
        pages: Vec<(DigestBytes, PageKeyBytes)>,
    },
    /// Namespace, pages, bytes on the device.
    Usage(#[serde(deserialize_with = "few")] Vec<(DigestBytes, u64, u64, u64)>),
    /// Comes with a file descriptor.
    Common,
    /// As JSON. The owner sends it on its own, on the first connection of a client with the feature
    /// [`TOTALS`](crate::protocol::TOTALS).
    Totals(#[serde(with = "by_name")] Box<Totals>),
    /// Encoded namespaces, with their names in the store.
    Records(#[serde(deserialize_with = "few")] Vec<(DigestBytes, serde_bytes::ByteBuf)>),
    /// The owner ends, and this client is to be the next owner. Sent on the first connection of
    /// each client with the feature [`HEIRS`](crate::protocol::HEIRS).
    Heir(ClientId),
    /// Pages moved out of a segment; `None` if it holds other pages by now.
    Emptied(Option<u64>),
    Recorded(Taken),
    /// As JSON.
    Quotas(#[serde(with = "by_name")] Box<QuotaReport>),
    Kept(#[serde(deserialize_with = "few")] Vec<Kept>),
    /// Namespace, first bytes of the key, end in seconds since 1970, bytes on the device.
    KeptPages(#[serde(deserialize_with = "few")] Vec<(DigestBytes, PrefixBytes, u32, u64)>),
    /// The slots of a tenant's keys. Comes with a pipe that holds the keys, 32 bytes each.
    Keys(LentSlots),
    /// The tenant gets no key now.
    Keyless(Refusal),
    /// The keys of these slots are erased. The owner sends it on its own, on the first connection
    /// of a client, which wipes them and answers with [`Request::Forgotten`].
    Forget {
        number: u64,
        #[serde(deserialize_with = "few")]
        slots: Vec<NonZeroU16>,
    },
    /// As JSON.
    Erased(#[serde(with = "by_name")] Box<Erasure>),
}

/// The facts that a client needs before its first request. The rest of the frame is ignored.
#[derive(Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// As the owner speaks it.
    pub protocol: Protocol,
    pub client: ClientId,
    /// Must be sent with every further connection.
    pub secret: u64,
    pub store: [u8; 16],
    /// The group whose members may use the store too. The next owner admits them too.
    pub group: Option<u32>,
    pub run: u32,
    pub segment_blocks: u32,
    /// Path and segments of each volume; no path for a lost volume.
    #[serde(deserialize_with = "few")]
    pub volumes: Vec<(Option<String>, u32)>,
    /// The store is encrypted.
    pub sealed: bool,
}

/// Pages of a reservation whose writes are over, and whether each write succeeded. Without pages it
/// is a heartbeat: the put goes on, and must not be aborted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LandedPut {
    pub reservation: u64,
    #[serde(deserialize_with = "few")]
    pub pages: Vec<(u32, bool)>,
}

/// A [`Grant`](larder_core::grants::Grant), by place.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum PlaceGrant {
    Write(Place),
    Settles,
    Refused(Refusal),
}

/// Why a request failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Failure {
    /// The listener speaks no version of the greeting's.
    Version {
        /// Its version nearest to them.
        ours: u32,
        release: String,
    },
    /// The message is invalid here; the connection ends.
    Protocol(String),
    Write(String),
    Sync,
    NoRoom,
    TooManyNamespaces(u32),
    UnknownNamespace,
    Closed,
    ReadOnlyService,
    /// This process may not be a client.
    Denied(Denial),
    /// The owner does not know the message.
    Unsupported,
    /// Another process records.
    Recorded,
    /// The quotas stay as they are, for this reason.
    Quotas(String),
}

/// Why a process may not be a client. Ids are those of the owner's user namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Denial {
    /// The owner cannot tell the process's user from others.
    #[error(
        "its owner cannot tell which user this process runs as: the user is not mapped in the \
         owner's user namespace (there it is {uid}); run all processes of the store in one user \
         namespace, or in user namespaces with the same mapping"
    )]
    Unmapped {
        /// The overflow id.
        uid: u32,
    },
    /// The process runs as another user and is no member of the group.
    #[error(
        "its owner serves user {store}{}, and this process runs as user {uid}; run it as user \
         {store}, or have the store served with `larder serve --group GID` for a group that this \
         process is a member of",
        .group.map(|gid| format!(" and group {gid}")).unwrap_or_default()
    )]
    User {
        /// The process's user.
        uid: u32,
        /// The user that the store belongs to.
        store: u32,
        /// The group whose members are served too.
        group: Option<u32>,
    },
    /// The kernel does not report the process's user.
    #[error(
        "its owner's kernel does not say which user this process runs as ({reason}); allow the \
         owner `getsockopt` in its seccomp profile"
    )]
    NotAttested {
        /// The system's error.
        reason: String,
    },
}

/// A struct: its fields by name, in JSON.
mod by_name {
    use serde::de::{DeserializeOwned, Error as _};
    use serde::ser::Error as _;
    use serde::{Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer, T: Serialize>(of: &T, to: S) -> Result<S::Ok, S::Error> {
        let json = serde_json::to_vec(of).map_err(S::Error::custom)?;
        serde_bytes::serialize(&json, to)
    }

    pub(super) fn deserialize<'de, D, T>(from: D) -> Result<Box<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: DeserializeOwned,
    {
        let json: &[u8] = serde_bytes::deserialize(from)?;
        serde_json::from_slice(json).map_err(D::Error::custom)
    }
}

/// A list of at most [`KEYS_MAX`] elements: one byte of a frame may stand for a large element.
fn few<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    struct Few<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Few<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {KEYS_MAX} elements")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut few = Vec::new();
            while let Some(element) = list.next_element()? {
                if few.len() == KEYS_MAX {
                    return Err(A::Error::invalid_length(KEYS_MAX + 1, &self));
                }
                few.push(element);
            }
            Ok(few)
        }
    }

    from.deserialize_seq(Few(PhantomData))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::api::Settings;
    use crate::protocol::variants;
    use crate::share::keys::keys_of;

    fn link() -> impl Strategy<Value = Link> {
        let any = (any::<Option<PageKeyBytes>>(), any::<u32>(), any::<u32>());
        any.prop_map(|(parent, depth, saved)| Link {
            parent,
            depth,
            saved,
        })
    }

    fn keys() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<[u8; KEY_BYTES]>(), 0..5).prop_map(|keys| keys.concat())
    }

    proptest! {
        #[test]
        fn no_frame_makes_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse::<Request<'_>>(&bytes);
            let _ = parse::<Reply>(&bytes);
            let _ = keys_of(&bytes);
            let mut stream = &bytes[..];
            let mut buffer = Vec::new();
            while matches!(receive(&mut stream, &mut buffer), Ok(true)) {}
            // The buffer is bounded by the bytes that arrive, not by the announced length.
            prop_assert!(buffer.capacity() <= 4 * bytes.len() + 64);
        }

        #[test]
        fn a_request_arrives_as_it_was_sent_and_not_when_it_is_cut(
            keys in keys(),
            namespace in any::<u16>(),
            links in prop::collection::vec(link(), 0..5),
            cut in any::<prop::sample::Index>(),
        ) {
            let sent = Request::Reserve { namespace, keys: &keys, links };
            let (mut frame, mut buffer) = (Vec::new(), Vec::new());
            send(&mut frame, &mut buffer, &sent).unwrap();
            let mut arrived = Vec::new();
            prop_assert!(receive(&mut &frame[..], &mut arrived).unwrap());
            let read: Request<'_> = parse(&arrived).unwrap();
            prop_assert_eq!(format!("{read:?}"), format!("{sent:?}"));
            prop_assert_eq!(keys_of(&keys).unwrap().len() * KEY_BYTES, keys.len());

            let short = &frame[..cut.index(frame.len())];
            prop_assert!(short.is_empty() || receive(&mut &short[..], &mut arrived).is_err());
        }
    }

    #[test]
    fn a_message_that_was_appended_later_is_unknown_and_a_malformed_one_is_not() {
        let requests = variants::<Request<'_>>();
        assert_eq!(requests.first(), Some(&"Hello"));
        assert_eq!(variants::<Reply>().first(), Some(&"Welcome"));
        let next = u32::try_from(requests.len()).unwrap();
        let frame = postcard::to_stdvec(&(next, "a field")).unwrap();
        let outcome = parse::<Request<'_>>(&frame);
        assert!(matches!(outcome, Err(WireError::Unknown(number)) if number == next));
        let outcome = parse::<Request<'_>>(&[]);
        assert!(matches!(outcome, Err(WireError::Nonsense(_))));
        // A known message, without its fields.
        let counted = requests.iter().position(|name| *name == "Counted");
        let short = postcard::to_stdvec(&u32::try_from(counted.unwrap()).unwrap()).unwrap();
        let outcome = parse::<Request<'_>>(&short);
        assert!(matches!(outcome, Err(WireError::Nonsense(_))));
    }

    #[test]
    fn a_greeting_may_have_more_fields_than_this_release_knows() {
        let hello = Request::Hello {
            magic: MAGIC,
            protocol: Protocol::default(),
        };
        let mut frame = postcard::to_stdvec(&hello).unwrap();
        frame.extend_from_slice(b"more");
        let read: Request<'_> = parse_greeting(&frame).unwrap();
        assert_eq!(format!("{read:?}"), format!("{hello:?}"));
    }

    #[test]
    fn a_report_may_have_more_and_fewer_fields_than_this_release_knows() {
        let json = br#"{"clients": 3, "a_later_field": [1], "stats": {"pages": 5, "later": {}}}"#;
        let mut frame = postcard::to_stdvec(&Reply::Stats(Box::default())).unwrap();
        frame.truncate(1);
        frame.extend(postcard::to_stdvec(&serde_bytes::Bytes::new(json)).unwrap());
        let Reply::Stats(report) = parse(&frame).unwrap() else {
            panic!("no report");
        };
        assert_eq!((report.clients, report.stats.pages), (3, 5));
        assert_eq!(report.puts_in_flight, 0);
        assert_eq!(report.settings, Settings::default());
    }

    #[test]
    fn a_list_of_more_elements_than_a_message_may_have_is_no_message() {
        let commit = |count| Request::Commit {
            reservation: 0,
            proofs: vec![None; count],
        };
        for (count, is_one) in [(KEYS_MAX, true), (KEYS_MAX + 1, false)] {
            let mut frame = Vec::new();
            send(&mut frame, &mut Vec::new(), &commit(count)).unwrap();
            assert_eq!(parse::<Request<'_>>(&frame[4..]).is_ok(), is_one);
        }
    }

    #[test]
    fn more_bytes_than_a_frame_may_have_are_neither_sent_nor_read() {
        let keys = vec![0; FRAME_BYTES_MAX];
        let request = Request::Contains {
            namespace: 0,
            keys: &keys,
        };
        let outcome = send(&mut Vec::new(), &mut Vec::new(), &request);
        assert!(matches!(outcome, Err(WireError::TooLong(_))));
        let announced = u32::try_from(FRAME_BYTES_MAX + 1).unwrap().to_le_bytes();
        let outcome = receive(&mut &announced[..], &mut Vec::new());
        assert!(matches!(outcome, Err(WireError::TooLong(_))));
        assert!(keys_of(&keys[..33]).is_none());
        let request = Request::Room;
        let mut frame = Vec::new();
        send(&mut frame, &mut Vec::new(), &request).unwrap();
        frame.push(7);
        assert!(matches!(
            parse::<Request<'_>>(&frame[4..]),
            Err(WireError::Trailing(1))
        ));
    }
}
