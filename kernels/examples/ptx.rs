//! Writes the built-in PTX of the crate. Run it after a change of the kernels' source.
//!
//! `LARDER_NVRTC_DIR=DIRECTORY cargo run -p larder-kernels --example ptx > kernels/cu/kv_copy.ptx`
//!
//! With files as arguments, these are compiled behind the source: `ptx kernels/fake/cu/forward.cu`
//! writes `kernels/fake/cu/forward.ptx`.
//!
//! Use an old NVRTC (12.1): older drivers refuse the PTX of newer versions.

#![allow(clippy::unwrap_used, missing_docs)]

use larder_kernels::cuda::image::{PTX_ARCH, stamp};
use larder_kernels::cuda::nvrtc::{Nvrtc, Target};
use larder_kernels::kernel::SOURCE;

fn main() {
    let nvrtc = Nvrtc::find().unwrap_or_else(|error| panic!("{error}"));
    let files = std::env::args().skip(1);
    let further = files.map(|file| std::fs::read_to_string(file).unwrap());
    let source = std::iter::once(SOURCE.to_owned()).chain(further);
    let source = source.collect::<String>();
    let compiled = nvrtc
        .compile(&source, &Target::Ptx(PTX_ARCH.to_owned()))
        .unwrap_or_else(|error| panic!("{error}"));
    print!(
        "{}{}",
        stamp(&source),
        String::from_utf8(compiled.image).unwrap()
    );
}
