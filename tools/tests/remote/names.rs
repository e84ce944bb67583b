//! The names of runs in a remote with keys.

use std::path::Path;

use larder_remote::{Keyring, RunNames, Trust};

use crate::home::Model;

/// Those of a model, for the nodes with this key file.
pub fn names(key_file: &Path, model: Model) -> RunNames {
    let keys = Keyring::load(key_file).unwrap();
    RunNames::of(&Trust::Sealed(keys), model.namespace().fingerprint())
}
