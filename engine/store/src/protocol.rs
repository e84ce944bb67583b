//! The compatibility rule of the catalog's protocol, and the agreement of two releases.
//!
//! Each side states in its greeting its release, the versions that it speaks, and its features. The
//! connection uses the highest common version. A feature may be used when both sides have it.
//!
//! | change | rule |
//! |---|---|
//! | new message | appended to its enum, with a feature of its own |
//! | new variant of an enum inside a message | appended; sent only to a side with its feature |
//! | another field of a message | a new message; fields of released messages never change |
//! | another field of [`Report`] or of a struct in it | with a default |
//! | another field of the greeting or of its reply | at the end, read only if bytes are left |
//! | another counter of [`Request::Counted`] | at the end of its list |
//! | another meaning of a message, of marks or of the staging area | a new version |
//!
//! - Reports, totals and latencies travel as JSON, by name: a reader ignores unknown names, and an
//!   absent name has its default. All other messages are positional.
//! - A message that the owner does not know gets [`Failure::Unsupported`], and the connection goes
//!   on. So a message without a reply may be sent only to an owner with its feature.
//! - A released version is spoken for at least one more release.
//! - Fixed for all versions: frames; [`Request::Hello`], up to its protocol; [`Reply::Welcome`], up
//!   to its protocol; [`Reply::Failed`] with [`Failure::Version`].
//!
//! [`Report`]: crate::share::wire::Report
//! [`Failure::Unsupported`]: crate::share::wire::Failure::Unsupported
//! [`Failure::Version`]: crate::share::wire::Failure::Version
//! [`Request::Counted`]: crate::share::wire::Request::Counted
//! [`Request::Hello`]: crate::share::wire::Request::Hello
//! [`Reply::Welcome`]: crate::share::wire::Reply::Welcome
//! [`Reply::Failed`]: crate::share::wire::Reply::Failed

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The highest version of the messages that this release speaks.
pub const VERSION: u32 = 13;

/// The lowest one.
pub const VERSION_MIN: u32 = 13;

/// Feature: the owner takes the counters of its clients
/// (`Request::Counted`).
pub const COUNTS: u64 = 1 << 0;

/// Feature: requests with a hint, and the refusal `NotAdmitted`. An owner without it gets requests
/// without hints. A client without it gets `Unreachable`, after which it does not put the page
/// again.
pub const POLICIES: u64 = 1 << 1;

/// Feature: the owner hands out the memory through which processes pace their writes and show how
/// the volumes answer them (`Request::Common`). Without it each process paces its own.
pub const COMMON: u64 = 1 << 2;

/// Feature: the owner sends totals (`Reply::Totals`) on the first
/// connection of its clients, and takes their latencies
/// (`Request::Measured`).
pub const TOTALS: u64 = 1 << 3;

/// Feature: a client may ask for the ownership (`Request::Own`), and
/// the owner names its heir before it ends (`Reply::Heir`).
pub const HEIRS: u64 = 1 << 4;

/// Feature: the owner waits for pages that are on their way from beneath the store
/// (`Request::Arrive`).
pub const BENEATH: u64 = 1 << 5;

/// Feature: the owner records the calls of all processes (`Request::Record`).
pub const TRAFFIC: u64 = 1 << 6;

/// The features of this release: messages and variants that a release before it does not have.
const FEATURES: u64 = COUNTS | POLICIES | COMMON | TOTALS | HEIRS | BENEATH | TRAFFIC;

/// Longest name of a release, in bytes.
const RELEASE_BYTES_MAX: usize = 32;

/// The protocol as one process speaks it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protocol {
    /// The lowest version.
    pub oldest: u32,
    /// The highest version.
    pub newest: u32,
    /// One bit for each feature.
    pub features: u64,
    /// The release of the process, for people.
    pub release: String,
}

/// The protocol of this release.
impl Default for Protocol {
    fn default() -> Protocol {
        Protocol {
            oldest: VERSION_MIN,
            newest: VERSION,
            features: FEATURES,
            release: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Versions, features if there are any, and release.
impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "release {}, protocol {}", self.release, self.newest)?;
        if self.oldest != self.newest {
            write!(f, " (from {})", self.oldest)?;
        }
        if self.features != 0 {
            write!(f, ", features {:#x}", self.features)?;
        }
        Ok(())
    }
}

/// The result of a greeting: the protocol of one client's connections.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Agreed {
    /// Version of the messages.
    pub version: u32,
    /// Features of both sides.
    pub features: u64,
    /// The release of the other side.
    pub release: String,
}

impl Agreed {
    /// Whether both sides have this feature.
    #[must_use]
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }
}

impl Protocol {
    /// Agrees with the other side. `None` without a common version.
    #[must_use]
    pub fn agree(&self, other: &Protocol) -> Option<Agreed> {
        let version = self.newest.min(other.newest);
        (version >= self.oldest.max(other.oldest)).then(|| Agreed {
            version,
            features: self.features & other.features,
            release: other.release.clone(),
        })
    }

    /// The version of this side that is nearest to the versions of a side with none in common.
    #[must_use]
    pub fn nearest_to(&self, other: &Protocol) -> u32 {
        if other.newest < self.oldest {
            self.oldest
        } else {
            self.newest
        }
    }

    /// Whether a side may state this: versions in order, a short printable name.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.oldest <= self.newest && is_name(&self.release)
    }
}

/// Whether the text can be the name of a release.
#[must_use]
pub(super) fn is_name(release: &str) -> bool {
    release.len() <= RELEASE_BYTES_MAX && release.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The names of an enum's variants, in the order of their numbers on the wire.
#[must_use]
pub fn variants<'a, T: Deserialize<'a>>() -> &'static [&'static str] {
    /// Remembers the variants that a type expects, and has no value for it.
    struct Names<'n>(&'n mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Names<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_enum<V: Visitor<'de>>(
            self,
            _: &'static str,
            variants: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = variants;
            Err(Self::Error::custom("only the names are asked for"))
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Self::Error::custom("no enum"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
        }
    }

    let mut names: &'static [&'static str] = &[];
    let _ = T::deserialize(Names(&mut names));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(oldest: u32, newest: u32, features: u64) -> Protocol {
        Protocol {
            oldest,
            newest,
            features,
            release: format!("0.{newest}.0"),
        }
    }

    #[test]
    fn the_highest_common_version_and_the_common_features_are_agreed() {
        for (ours, theirs, agreed) in [
            (protocol(8, 8, 0), protocol(8, 8, 0), Some((8, 0))),
            (
                protocol(8, 9, 0b111),
                protocol(7, 8, 0b101),
                Some((8, 0b101)),
            ),
            (protocol(8, 9, 1), protocol(9, 12, 3), Some((9, 1))),
            (protocol(8, 9, 0), protocol(10, 12, 0), None),
        ] {
            let both = [(&ours, &theirs), (&theirs, &ours)];
            for (one, other) in both {
                let found = one.agree(other);
                let expected = agreed.map(|(version, features)| Agreed {
                    version,
                    features,
                    release: other.release.clone(),
                });
                assert_eq!(found, expected, "{one} and {other}");
            }
        }
    }

    #[test]
    fn a_side_names_its_version_that_is_nearest_to_the_other_side() {
        let ours = protocol(8, 11, 0);
        assert_eq!(ours.nearest_to(&protocol(3, 7, 0)), 8);
        assert_eq!(ours.nearest_to(&protocol(12, 13, 0)), 11);
    }
}
