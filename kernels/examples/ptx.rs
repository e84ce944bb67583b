//! Writes the PTX that is built into the crate, after the kernels' source has changed.
//!
//! `LARDER_NVRTC_DIR=DIRECTORY cargo run -p larder-kernels --example ptx > kernels/cu/kv_copy.ptx`
//!
//! Take an old NVRTC (12.1): PTX of a newer one is refused by older drivers.

#![allow(clippy::unwrap_used, missing_docs)]

use larder_kernels::cuda::image::{PTX_ARCH, stamp};
use larder_kernels::cuda::nvrtc::{Nvrtc, Target};
use larder_kernels::kernel::SOURCE;

fn main() {
    let nvrtc = Nvrtc::find().unwrap_or_else(|error| panic!("{error}"));
    let compiled = nvrtc
        .compile(SOURCE, &Target::Ptx(PTX_ARCH.to_owned()))
        .unwrap_or_else(|error| panic!("{error}"));
    print!(
        "{}{}",
        stamp(SOURCE),
        String::from_utf8(compiled.image).unwrap()
    );
}
