//! Which pages of puts are encoded by a codec, and pages as they are stored.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use larder_base::runtime::Mutex;
use larder_codec::{Codec, Malformed};
use larder_format::{BLOCK_BYTES, Namespace, PageShape};
use serde::{Deserialize, Serialize};

/// Whether puts encode pages. A page whose encoded form takes no fewer blocks is stored plain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CodecChoice {
    /// No.
    Off,
    /// Yes, by the lossless codec for values in bf16.
    Bf16,
    /// By the codec for bf16, in namespaces whose elements are declared as bf16, as long as pages
    /// take at most 1 / 1.15 of their bytes. 64 pages of 4,160 are measured.
    #[default]
    Auto,
}

/// Pages that are measured together.
const TRIAL_PAGES: u32 = 64;

/// Pages for which a measurement decides.
const VERDICT_PAGES: u32 = 4096;

/// The least ratio of plain bytes to stored bytes, in hundredths.
const RATIO_MIN: u64 = 115;

/// Decides for the puts of one process into one namespace.
#[derive(Debug)]
pub struct Encoder {
    /// `None` if all pages are encoded.
    phase: Option<Mutex<Phase>>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Trial {
        pages: u32,
        plain_blocks: u64,
        stored_blocks: u64,
    },
    Verdict {
        encodes: bool,
        left: u32,
    },
}

impl Phase {
    const BEGIN: Phase = Phase::Trial {
        pages: 0,
        plain_blocks: 0,
        stored_blocks: 0,
    };
}

impl Encoder {
    /// `None` if no page is encoded.
    #[must_use]
    pub fn of(choice: CodecChoice, namespace: &Namespace) -> Option<Arc<Encoder>> {
        let phase = match choice {
            CodecChoice::Bf16 => None,
            CodecChoice::Auto if is_bf16(&namespace.fields().dtype) => {
                Some(Mutex::new(Phase::BEGIN))
            }
            CodecChoice::Auto | CodecChoice::Off => return None,
        };
        Some(Arc::new(Encoder { phase }))
    }

    /// Whether the next page is encoded.
    pub fn takes(&self) -> bool {
        let Some(phase) = &self.phase else {
            return true;
        };
        let mut phase = phase.lock();
        match &mut *phase {
            Phase::Trial { .. } => true,
            Phase::Verdict { left: 0, .. } => {
                *phase = Phase::BEGIN;
                true
            }
            Phase::Verdict { encodes, left } => {
                *left -= 1;
                *encodes
            }
        }
    }

    /// A page that was encoded takes so many blocks.
    pub fn took(&self, plain: u32, stored: u32) {
        let Some(phase) = &self.phase else {
            return;
        };
        let mut phase = phase.lock();
        if let Phase::Trial {
            pages,
            plain_blocks,
            stored_blocks,
        } = &mut *phase
        {
            *pages += 1;
            *plain_blocks += u64::from(plain);
            *stored_blocks += u64::from(stored);
            if *pages == TRIAL_PAGES {
                *phase = Phase::Verdict {
                    encodes: *plain_blocks * 100 >= *stored_blocks * RATIO_MIN,
                    left: VERDICT_PAGES,
                };
            }
        }
    }
}

/// Decodes a page from its stored bytes into `page`, in which each part is padded with zeros to
/// whole blocks.
///
/// # Errors
/// If the codec did not make these bytes of a page of this shape.
///
/// # Panics
/// If `page` is shorter than a plain page.
pub fn decode(shape: &PageShape, stored: &[u8], mut page: &mut [u8]) -> Result<(), Malformed> {
    let mut parts = Vec::with_capacity(shape.parts());
    for part in 0..shape.parts() {
        let bytes = shape.part_bytes(part) as usize;
        let (padded, rest) = page.split_at_mut(bytes.next_multiple_of(BLOCK_BYTES));
        let (part, padding) = padded.split_at_mut(bytes);
        padding.fill(0);
        parts.push(part);
        page = rest;
    }
    Codec::new().decode(stored, &mut parts)
}

/// The stored length of an encrypted page is a multiple of a sixteenth of the page, and of whole
/// blocks. A length tells how well a page can be encoded, and so something of its content.
#[must_use]
pub fn sealed_unit(page_bytes: usize) -> usize {
    page_bytes.div_ceil(16).next_multiple_of(BLOCK_BYTES)
}

/// The names of bf16 in engines and frameworks.
fn is_bf16(dtype: &str) -> bool {
    matches!(dtype, "bfloat16" | "bf16" | "torch.bfloat16")
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CodecChoice::Off => "off",
            CodecChoice::Bf16 => "bf16",
            CodecChoice::Auto => "auto",
        })
    }
}

impl FromStr for CodecChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<CodecChoice, String> {
        [CodecChoice::Off, CodecChoice::Bf16, CodecChoice::Auto]
            .into_iter()
            .find(|choice| choice.to_string() == text)
            .ok_or_else(|| format!("no codec has the name {text:?}: choose off, bf16 or auto"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::share::tests::namespace;

    /// How many of `pages` pages are encoded, if each takes `stored` of 100 blocks.
    fn encoded(encoder: &Encoder, pages: u32, stored: u32) -> u32 {
        let mut count = 0;
        for _ in 0..pages {
            if encoder.takes() {
                encoder.took(100, stored);
                count += 1;
            }
        }
        count
    }

    #[test]
    fn pages_that_stay_large_are_not_encoded_until_they_are_measured_again() {
        let bf16 = Encoder {
            phase: Some(Mutex::new(Phase::BEGIN)),
        };
        assert_eq!(encoded(&bf16, 1000, 75), 1000);
        assert_eq!(encoded(&bf16, VERDICT_PAGES + TRIAL_PAGES - 1000, 75), 3160);
        assert_eq!(encoded(&bf16, TRIAL_PAGES, 87), TRIAL_PAGES);
        assert_eq!(encoded(&bf16, VERDICT_PAGES, 75), 0);
        assert_eq!(encoded(&bf16, VERDICT_PAGES, 75), VERDICT_PAGES);
    }

    #[test]
    fn a_choice_holds_for_all_namespaces_or_for_those_of_bf16() {
        let other = namespace(65536);
        assert!(Encoder::of(CodecChoice::Off, &other).is_none());
        assert!(Encoder::of(CodecChoice::Bf16, &other).is_some());
        let is_declared = is_bf16(&other.fields().dtype);
        assert_eq!(
            Encoder::of(CodecChoice::Auto, &other).is_some(),
            is_declared
        );
        for choice in [CodecChoice::Off, CodecChoice::Bf16, CodecChoice::Auto] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!(
            "zstd"
                .parse::<CodecChoice>()
                .unwrap_err()
                .contains("off, bf16 or auto")
        );
    }
}
