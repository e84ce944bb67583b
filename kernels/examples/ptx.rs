//! Writes the built-in PTX of the crate. Run it after a change of the kernels' source.
//!
//! `LARDER_NVRTC_DIR=DIRECTORY cargo run -p larder-kernels --example ptx > kernels/cu/kv_copy.ptx`
//!
//! Use an old NVRTC (12.1): older drivers refuse the PTX of newer versions.

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
