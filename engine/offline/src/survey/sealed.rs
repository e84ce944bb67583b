//! The keyring of an encrypted store, and the pages that its keys open.

use std::path::Path;

use larder_disk::Disk;
use larder_format::{BLOCK_BYTES, PageKey, Seal};
use larder_seal::PageName;
use larder_store::error::StoreError;
use larder_store::keys::Unopened;
use larder_store::recovery::scan::Bodies;
use larder_store::recovery::{Found, Whole};
use larder_store::volume::keyrings::{Copies, not_encrypted, unlocked};
use larder_store::volume::quotas;

use super::facts::{Condition, Flaw, FlawReason, Sealed, SurveyOptions};
use super::volumes::{Opening, VolumeFacts, VolumeState};
use super::{Page, Survey};

impl Opening {
    /// How the descriptor blocks of the store are read. Adds the faults of its keyring.
    pub(super) fn bodies(
        &mut self,
        path: &Path,
        disk: &dyn Disk,
        options: &SurveyOptions,
        condition: Condition,
    ) -> Result<Bodies, StoreError> {
        let superblocks = self.superblocks().map(|superblock| superblock.keyring);
        let stated = superblocks.fold(self.reference.keyring, u64::max);
        // The end of a file that was cut is another place.
        let volumes = self.facts.iter().enumerate();
        let whole = volumes.filter(|(_, facts)| facts.state == VolumeState::Present);
        let lengths = whole.filter_map(|(index, facts)| Some((index, facts.bytes?)));
        let copies = Copies::read(disk, lengths, self.reference.store);
        let disowned = copies.disowned(stated);
        if stated == 0 && disowned.is_none() {
            return match &options.sealed {
                Sealed::Unlocked(_) => Err(not_encrypted(path)),
                Sealed::Refused | Sealed::Locked => Ok(Bodies::Clear),
            };
        }
        let counting = match disowned {
            Some(reason) => Err(reason),
            None => copies.counting(stated),
        };
        if let Sealed::Refused = &options.sealed {
            return Err(StoreError::Sealed(path.to_owned()));
        }
        let other_is_good = counting.is_ok();
        // The owner of a store in use may be writing them.
        if condition != Condition::InUse || !other_is_good {
            for bad in copies.bad(counting.as_ref().ok().copied()) {
                let reason = bad.reason;
                let reason = FlawReason::Keyring {
                    reason,
                    other_is_good,
                };
                self.flaws.push(Flaw::at(bad.volume, bad.offset, reason));
            }
        }
        match (&options.sealed, counting) {
            (Sealed::Unlocked(key), Ok(newest)) => {
                let keys = unlocked(path, newest.clone(), key)?;
                Ok(Bodies::Sealed(keys.into()))
            }
            (Sealed::Unlocked(_), Err(reason)) => Err(StoreError::Keyring {
                path: path.to_owned(),
                reason,
            }),
            (Sealed::Refused | Sealed::Locked, counting) => {
                if let Err(reason) = counting {
                    let other_is_good = false;
                    let reason = FlawReason::Keyring {
                        reason,
                        other_is_good,
                    };
                    self.flaws.push(Flaw::of_volume(0, reason));
                }
                Ok(Bodies::Locked)
            }
        }
    }
}

impl Opening {
    /// Adds the faults of the quotas, which lie in the first volume.
    pub(super) fn quotas(&mut self, disk: &dyn Disk, bodies: &Bodies, condition: Condition) {
        let is_whole = |facts: &&VolumeFacts| facts.state == VolumeState::Present;
        let first = self.facts.first().filter(is_whole);
        let Some(bytes) = first.and_then(|facts| facts.bytes) else {
            return;
        };
        let own = self.opened.first().and_then(Option::as_ref);
        let superblock = own.and_then(|opened| opened.superblock.as_ref());
        let keys = match bodies {
            Bodies::Sealed(keys) => Some(keys),
            Bodies::Clear | Bodies::Locked => None,
        };
        let superblock = superblock.unwrap_or(&self.reference);
        let (state, bad) = quotas::survey(disk, superblock, bytes, keys);
        let other_is_good = state.fault().is_none();
        // The owner of a store in use may be writing them.
        if condition == Condition::InUse && other_is_good {
            return;
        }
        if bad.is_empty()
            && let Some(reason) = state.fault()
        {
            let reason = reason.to_owned();
            let reason = FlawReason::Quotas {
                reason,
                other_is_good,
            };
            self.flaws.push(Flaw::of_volume(0, reason));
        }
        for copy in bad {
            let reason = FlawReason::Quotas {
                reason: copy.reason,
                other_is_good,
            };
            self.flaws.push(Flaw::at(0, copy.offset, reason));
        }
    }
}

impl Survey {
    /// Decrypts a page in place, whose stored bytes have the right checksum. A page of a store that
    /// is not encrypted stays as it is.
    ///
    /// # Errors
    /// See [`Unopened`].
    pub fn open_page(&self, page: &Page, stored: &mut [u8]) -> Result<(), Unopened> {
        self.open(page.namespace, &page.key, page.seal, stored)
    }

    /// The same for a record of this survey.
    pub(crate) fn open_found(
        &self,
        found: &Found<Whole>,
        stored: &mut [u8],
    ) -> Result<(), Unopened> {
        let namespace = usize::from(found.slot.0);
        self.open(namespace, &found.extra.key, self.seal_of(found), stored)
    }

    /// Whether pages are decrypted.
    pub(super) fn is_unlocked(&self) -> bool {
        matches!(self.bodies, Bodies::Sealed(_))
    }

    pub(super) fn seal_of(&self, found: &Found<Whole>) -> Option<Seal> {
        let place = (found.place.segment, found.place.start);
        self.records.seals.get(&place).copied()
    }

    fn open(
        &self,
        namespace: usize,
        key: &PageKey,
        seal: Option<Seal>,
        stored: &mut [u8],
    ) -> Result<(), Unopened> {
        let Bodies::Sealed(keys) = &self.bodies else {
            return Ok(());
        };
        // An encrypted store has no plain page: a record without a seal is another writer's.
        let seal = seal.ok_or(Unopened::Tag)?;
        let name = PageName {
            namespace: self.namespaces[namespace].fingerprint,
            key: *key,
            blocks: self.records.page_blocks[namespace],
            stored: u32::try_from(stored.len() / BLOCK_BYTES).unwrap_or(u32::MAX),
        };
        keys.open_page(&name, &seal, stored)
    }
}
