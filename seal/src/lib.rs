//! Encryption of the pages and of the metadata of a store and of archives, and their keys.
//!
//! A page is encrypted with AES-256-GCM under a key of its own: the HMAC-SHA256 of the tenant's key
//! with the name of the page and a random salt ([`TenantKey`]). Metadata is encrypted with
//! XAES-256-GCM under the master key ([`MasterKey`]). The master key and the tenants' keys are
//! random. They lie in a [`Keyring`], wrapped by a key that the operator holds ([`WrappingKey`]).
//!
//! Invariants:
//! - Salts and nonces are drawn in this crate, from a [`Random`]. No function takes one to encrypt
//!   with. Nothing that is stored is an input of them: a copied or restored store repeats none.
//! - Keys lie in locked memory that no dump and no forked child has ([`Vault`]). The key of a
//!   single page, and the key schedules of the cipher, exist only during a call.
//! - A page or a text whose tag is wrong is never given out: the buffers are zeroed.
//!
//! A module imports only the modules below it.
//!
//! | module | owns |
//! |---|---|
//! | `archive` | the key of an archive |
//! | `keyring` | the keys of a store: layout, wraps, tenants |
//! | `source` | where the wrapping key is read |
//! | `wrapping` | the key that wraps the master key |
//! | `master` | encryption of metadata |
//! | `page` | encryption of pages |
//! | `salts` | random bytes |
//! | `vault` | memory for keys |
//! | `xaes` | XAES-256-GCM |
//! | `cipher` | AES-256-GCM in steps, AES and HMAC: the calls to AWS-LC, the only `unsafe` |

#![deny(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod archive;
mod cipher;
mod keyring;
mod master;
mod page;
mod salts;
mod source;
mod vault;
mod wrapping;
mod xaes;

pub use archive::ArchiveKey;
pub use cipher::CipherError;
pub use keyring::{Keyring, KeyringError, NO_TENANT};
pub use master::MasterKey;
pub use page::{OpenError, PageName, SealError, TenantKey};
pub use salts::{Random, Salts};
pub use source::{KeySource, SourceError};
pub use vault::{Vault, VaultError};
pub use wrapping::WrappingKey;
