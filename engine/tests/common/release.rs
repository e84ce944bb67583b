//! A release after this one, as far as a test can be it: its protocol, and the features of its
//! stores.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use larder_engine::format::{
    BLOCK_BYTES, Features, Label, SUPERBLOCK_OFFSETS, Superblock, superblock_offsets,
};
use larder_store::protocol::Protocol;

/// The bit of a feature that this release does not know.
pub const LATER: u64 = 1 << 63;

/// The protocol of the next release: one more version, one more feature.
pub fn next_release() -> Protocol {
    let this = Protocol::default();
    Protocol {
        newest: this.newest + 1,
        features: this.features | LATER,
        release: "0.2.0".to_owned(),
        ..this
    }
}

/// The features of a store of the next release.
pub fn later_features(compatible: u64, read_only_compatible: u64) -> Features {
    Features {
        compatible,
        read_only_compatible,
        release: Label::new("0.2.0").unwrap(),
        names: Label::new("tree").unwrap(),
    }
}

/// Gives the store on one volume, which is closed, other features.
pub fn set_features(path: &Path, features: Features) {
    change_superblocks(path, |superblock| superblock.features = features);
}

/// Changes all superblocks of a store on one volume, which is closed.
pub fn change_superblocks(path: &Path, change: impl Fn(&mut Superblock)) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    for offset in superblock_offsets(bytes) {
        let mut block = [0; BLOCK_BYTES];
        file.read_exact_at(&mut block, offset).unwrap();
        let mut superblock = Superblock::decode(&block).unwrap();
        change(&mut superblock);
        let block = superblock.encode().unwrap();
        file.write_all_at(&block[..], offset).unwrap();
    }
}

/// The features of a store, by its first superblock.
pub fn features(path: &Path) -> Features {
    let mut block = [0; BLOCK_BYTES];
    let file = File::open(path).unwrap();
    file.read_exact_at(&mut block, SUPERBLOCK_OFFSETS[0])
        .unwrap();
    Superblock::decode(&block).unwrap().features
}
