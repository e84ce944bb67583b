//! Hostile bytes against everything that reads them.
//!
//! Each function here is the body of a fuzz target of the same name: it takes any bytes, and panics where a promise is broken.
//! The bodies are plain Rust, so that what a fuzzer once found is replayed by an ordinary test (`tests/regressions.rs`); the
//! fuzzer itself, and the nightly compiler it needs, hide behind the feature `libfuzzer`.
//!
//! Nothing that is read may make its reader panic, loop without end, take more than 256 MiB at once, or give out bytes that
//! were not put under the name they were asked for by.
//!
//! | target | reads |
//! |---|---|
//! | [`superblock`], [`segment_header`], [`descriptor_block`], [`namespace_record`] | one structure each |
//! | [`text`], [`sizes`] | trace lines and keys; sizes and durations |
//! | [`image`] | a small valid store, edited, its checksums made right again: recovery, core and all |
//! | [`raw_image`] | a file of arbitrary bytes: survey, opening, reads and puts |
//! | [`messages`](messages()) | what owner and clients of a shared store say to each other: any bytes to either, and requests in any order |
//! | [`core()`] | nothing from disk: the simulation of the core, its dice thrown by the input |
//!
//! | module | what it is |
//! |---|---|
//! | [`structures`], [`texts`], [`raw`] | the bodies |
//! | [`sample`] | small valid stores, and what was put into them |
//! | [`edits`], [`feed`] | what an input does to a store |
//! | [`forge`] | stores that nobody wrote |
//! | [`machine`], [`memory_disk`] | the core over a disk in memory |
//! | [`mod@messages`] | that core behind an owner's answers, and what a client makes of them |
//! | [`examine`] | what must hold of any store |
//! | [`seeds`] | the inputs to begin with |

#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of an input are cut to fit"
)]

pub mod edits;
pub mod examine;
pub mod feed;
pub mod forge;
pub mod machine;
pub mod memory_disk;
pub mod messages;
pub mod raw;
pub mod sample;
pub mod seeds;
pub mod structures;
pub mod texts;

use feed::Feed;
pub use messages::messages;
pub use raw::raw_image;
pub use structures::{descriptor_block, namespace_record, segment_header, superblock};
pub use texts::{sizes, text};

/// A small store, edited: the first byte chooses it, edits follow, then what is done with it once it is open.
///
/// # Panics
/// When a promise is broken.
pub fn image(data: &[u8]) {
    let mut feed = Feed::new(data);
    let sample = sample::sample(feed.below(sample::RECIPES));
    let mut image = sample.image.clone();
    edits::edit(&mut image, &mut feed);
    examine::live_on(image, sample.truth.clone(), &mut feed);
}

/// The simulation of the core, the input in the place of its generator.
///
/// # Panics
/// When a promise is broken.
pub fn core(data: &[u8]) {
    larder_sim::play_script(data, None);
}

/// A target: its name and its body.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 10] = [
    ("superblock", superblock),
    ("segment_header", segment_header),
    ("descriptor_block", descriptor_block),
    ("namespace_record", namespace_record),
    ("text", text),
    ("sizes", sizes),
    ("image", image),
    ("raw_image", raw_image),
    ("messages", messages),
    ("core", core),
];
