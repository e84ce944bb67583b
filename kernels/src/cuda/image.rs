//! Which code the device gets: from the cache of cubins, from NVRTC, or the PTX that is built in.
//!
//! A cubin in the cache loads in microseconds; NVRTC makes one in a fraction of a second where it is installed; the PTX needs
//! nothing but the driver, which compiles it.
//!
//! A cached cubin is named after everything it depends on: architecture, source, version of NVRTC. Its file ends with the BLAKE3
//! of its bytes, and is written under another name and renamed: a file that is torn, cut off or spoiled is none, and is
//! written again.

use std::io::{self, Write};
use std::path::PathBuf;

use super::nvrtc::{Nvrtc, Target};
use crate::kernel::SOURCE;

/// The kernels for the driver to compile. The first line says of which source.
pub const PTX: &str = include_str!("../../cu/kv_copy.ptx");

/// The architecture that [`PTX`] is for; later ones take it too.
pub const PTX_ARCH: &str = "compute_80";

const HASH_BYTES: usize = blake3::OUT_LEN;

/// Largest file that can be a cubin of ours, in bytes; longer ones are not read.
const CUBIN_BYTES_MAX: u64 = 16 << 20;

/// Code for the driver to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// A cubin, or PTX that ends with a NUL.
    pub bytes: Vec<u8>,
    /// Where it came from.
    pub origin: Origin,
}

/// Where code came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The cache.
    Cached,
    /// Compiled just now.
    Compiled,
    /// The PTX that is built in.
    BuiltIn,
}

/// The first line of a PTX file: which source it was made from.
#[must_use]
pub fn stamp(source: &str) -> String {
    format!(
        "// kv_copy.cu {}\n",
        blake3::hash(source.as_bytes()).to_hex()
    )
}

/// Cubins on disk.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// In a directory, which is made when something is stored.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Cache {
        Cache {
            directory: directory.into(),
        }
    }

    /// A cubin, if there is a whole one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.directory.join(name);
        if std::fs::metadata(&path).ok()?.len() > CUBIN_BYTES_MAX {
            return None;
        }
        let mut bytes = std::fs::read(&path).ok()?;
        let hash = bytes.split_off(bytes.len().checked_sub(HASH_BYTES)?);
        (!bytes.is_empty() && blake3::hash(&bytes).as_bytes() == hash.as_slice()).then_some(bytes)
    }

    /// Stores a cubin.
    ///
    /// # Errors
    /// Those of the file system. What was there before is there still.
    pub fn put(&self, name: &str, cubin: &[u8]) -> io::Result<()> {
        std::fs::create_dir_all(&self.directory)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
        file.write_all(cubin)?;
        file.write_all(blake3::hash(cubin).as_bytes())?;
        file.persist(self.directory.join(name))?;
        Ok(())
    }
}

/// The name of a cubin in the cache.
#[must_use]
pub fn cubin_name(arch: &str, source: &str, (major, minor): (i32, i32)) -> String {
    let hash = blake3::hash(source.as_bytes()).to_hex();
    format!("kv_copy-{arch}-{hash}-nvrtc-{major}.{minor}.cubin")
}

/// The best code to be had for an architecture. Never fails: what the cache or NVRTC cannot give is built in.
#[must_use]
pub fn best(arch: &str, nvrtc: Option<&Nvrtc>, cache: Option<&Cache>) -> Image {
    let cubin = nvrtc.and_then(|nvrtc| cubin(arch, nvrtc, cache));
    cubin.unwrap_or_else(|| Image {
        bytes: [PTX.as_bytes(), &[0]].concat(),
        origin: Origin::BuiltIn,
    })
}

fn cubin(arch: &str, nvrtc: &Nvrtc, cache: Option<&Cache>) -> Option<Image> {
    let name = cubin_name(arch, SOURCE, nvrtc.version());
    if let Some(bytes) = cache.and_then(|cache| cache.get(&name)) {
        return Some(Image {
            bytes,
            origin: Origin::Cached,
        });
    }
    // An architecture that this NVRTC does not know, say: the driver may know it.
    let compiled = nvrtc
        .compile(SOURCE, &Target::Cubin(arch.to_owned()))
        .ok()?;
    if let Some(cache) = cache {
        // A cache that cannot be written costs the next start its time, and nothing else.
        let _ = cache.put(&name, &compiled.image);
    }
    Some(Image {
        bytes: compiled.image,
        origin: Origin::Compiled,
    })
}
