//! Hostile bytes against every reader of bytes.
//!
//! Each function here is the body of a fuzz target of the same name. It takes any bytes, and panics
//! if a promise is broken. The bodies are plain Rust, so that an ordinary test replays a fuzzer's
//! findings (`tests/regressions.rs`). The fuzzer itself needs the nightly compiler, and is behind
//! the feature `libfuzzer`.
//!
//! No input may make its reader panic, loop without end, allocate more than 256 MiB at once, or
//! return bytes that were not put under the requested name.
//!
//! | target | reads |
//! |---|---|
//! | [`superblock`], [`segment_header`] | one structure each |
//! | [`descriptor_block`], [`namespace_record`] | one structure each |
//! | [`text`], [`sizes`] | trace lines and keys; sizes and durations |
//! | [`image`] | a small valid store, edited, with valid checksums: recovery and core |
//! | [`raw_image`] | a file of arbitrary bytes: survey, opening, reads and puts |
//! | [`messages`](messages()) | messages of a shared store: any bytes, and requests in any order |
//! | [`keyring()`] | rows of blocks of a keyring, and its keys |
//! | [`codec()`] | the stream of a page, and a page: each form of the code |
//! | [`core()`] | nothing from disk: the simulation of a store, with the input as randomness |
//!
//! A module imports only the modules below it. Of several modules in one row, a module imports only
//! those behind it.
//!
//! | module | content |
//! |---|---|
//! | [`seeds`] | the first inputs |
//! | [`mod@keyring`], [`structures`], [`texts`], [`raw`], [`mod@codec`] | the bodies |
//! | [`mod@messages`] | the catalog behind an owner's answers, and a client that reads them |
//! | `catalog` | the core as a catalog |
//! | [`examine`] | the checks that every store must pass |
//! | [`forge`] | forged stores |
//! | [`sample`] | small valid stores, and the pages put into them |
//! | [`edits`], [`feed`] | the changes that an input makes to a store |
//! | [`machine`], [`memory_disk`] | the core over a disk in memory |

#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of an input are truncated to fit"
)]

mod catalog;
pub mod codec;
pub mod edits;
pub mod examine;
pub mod feed;
pub mod forge;
pub mod keyring;
pub mod machine;
pub mod memory_disk;
pub mod messages;
pub mod raw;
pub mod sample;
pub mod seeds;
pub mod structures;
pub mod texts;

pub use codec::codec;
use feed::Feed;
pub use keyring::keyring;
pub use messages::messages;
pub use raw::raw_image;
pub use structures::{descriptor_block, namespace_record, segment_header, superblock};
pub use texts::{sizes, text};

/// A small store, edited: the first byte chooses it, edits follow, then the operations on the open
/// store.
///
/// # Panics
/// If a promise is broken.
pub fn image(data: &[u8]) {
    let mut feed = Feed::new(data);
    let sample = sample::sample(feed.below(sample::RECIPES));
    let mut image = sample.image.clone();
    edits::edit(&mut image, &mut feed);
    examine::live_on(image, sample.truth.clone(), &mut feed);
}

/// The simulation of a store of one process, with the input in place of its generator.
///
/// # Panics
/// If a promise is broken.
pub fn core(data: &[u8]) {
    larder_sim::play_script(data);
}

/// A target: its name and its body.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 12] = [
    ("superblock", superblock),
    ("segment_header", segment_header),
    ("descriptor_block", descriptor_block),
    ("namespace_record", namespace_record),
    ("text", text),
    ("sizes", sizes),
    ("image", image),
    ("raw_image", raw_image),
    ("messages", messages),
    ("codec", codec),
    ("keyring", keyring),
    ("core", core),
];
