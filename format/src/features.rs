//! The features of a store, by which an older release decides whether it may use the store.
//!
//! | a release that does not know the feature | place of the feature |
//! |---|---|
//! | reads and writes the store, and keeps the bit | bit of `compatible` |
//! | reads the store, and refuses to write it | bit of `read_only_compatible` |
//! | refuses to open the store | the format version is raised |
//!
//! `names` has the names of all of them, so that a release that does not know a feature can name
//! it. A superblock has these fields at the same place in all versions. Creation and an explicit
//! command add features; an open never does. So a store stays usable for an older release until an
//! operator decides otherwise.

use std::fmt;

/// Bits of `read_only_compatible` that this release knows.
const READ_ONLY_KNOWN: u64 = 0;

/// Text of at most `N` bytes in a field of fixed size, with zeros behind it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Label<const N: usize>([u8; N]);

impl<const N: usize> Label<N> {
    /// The text as a label; `None` if it is too long or not printable ASCII.
    #[must_use]
    pub fn new(text: &str) -> Option<Label<N>> {
        let is_plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        let mut bytes = [0; N];
        bytes
            .get_mut(..text.len())
            .filter(|_| is_plain)?
            .copy_from_slice(text.as_bytes());
        Some(Label(bytes))
    }

    /// The field's bytes as they were read.
    #[must_use]
    pub fn from_bytes(bytes: [u8; N]) -> Label<N> {
        Label(bytes)
    }

    /// The field's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; N] {
        &self.0
    }

    /// Whether the field is unused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0[0] == 0
    }
}

impl<const N: usize> Default for Label<N> {
    fn default() -> Label<N> {
        Label([0; N])
    }
}

/// The text, with `?` for each byte that is not printable ASCII.
impl<const N: usize> fmt::Display for Label<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.iter().take_while(|byte| **byte != 0);
        let text: String = text
            .map(|byte| match byte {
                b' '..=b'~' => char::from(*byte),
                _ => '?',
            })
            .collect();
        f.pad(&text)
    }
}

impl<const N: usize> fmt::Debug for Label<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// The features of a store and the release that wrote its superblock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features {
    /// Features that a release may ignore.
    pub compatible: u64,
    /// Features that a release may ignore if it only reads.
    pub read_only_compatible: u64,
    /// The release that wrote the superblock; empty before 0.1.0.
    pub release: Label<16>,
    /// The names of all features, separated by spaces; including the features that raised the
    /// version.
    pub names: Label<64>,
}

impl Features {
    /// The same features, written by this release.
    #[must_use]
    pub fn written_here(self) -> Features {
        Features {
            release: Label::new(env!("CARGO_PKG_VERSION")).unwrap_or_default(),
            ..self
        }
    }

    /// Whether this release knows all features that a writer must know.
    #[must_use]
    pub fn may_be_written(&self) -> bool {
        self.read_only_compatible & !READ_ONLY_KNOWN == 0
    }
}

/// The names of the features, or their bits if they have no names, and the release.
impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.names.is_empty() {
            write!(f, "features \"{}\"", self.names)?;
        } else if self.compatible == 0 && self.read_only_compatible == 0 {
            f.write_str("no named features")?;
        } else {
            write!(
                f,
                "features {:#x} and, for reading alone, {:#x}",
                self.compatible, self.read_only_compatible
            )?;
        }
        if self.release.is_empty() {
            return Ok(());
        }
        write!(f, ", written by release {}", self.release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_short_printable_text_and_shows_other_bytes_as_question_marks() {
        assert_eq!(
            Label::<4>::new("abcd").map(|it| it.to_string()).as_deref(),
            Some("abcd")
        );
        assert_eq!(Label::<4>::new("abcde"), None);
        assert_eq!(Label::<4>::new("a\n"), None);
        assert_eq!(Label::from_bytes([b'a', 7, 0, b'b']).to_string(), "a?");
        assert!(Label::<4>::default().is_empty());
    }

    #[test]
    fn an_unknown_feature_forbids_writing_only_in_the_word_for_it() {
        let bit = 1 << 63;
        let ignored = Features {
            compatible: bit,
            ..Features::default()
        };
        assert!(ignored.may_be_written());
        let read = Features {
            read_only_compatible: bit,
            ..Features::default()
        };
        assert!(!read.may_be_written());
    }
}
