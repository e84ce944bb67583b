//! New keys for the tenants of an encrypted store, in place.
//!
//! 1. The tenants get new keys, durable on all volumes. Their former keys stay for the pages that
//!    have them.
//! 2. Each page of a former key is moved, and is encrypted with the new key on the way.
//! 3. When no such page is left, the former keys are overwritten on all volumes.
//!
//! A kill at any moment leaves every page readable. The next renewal goes on: a tenant with a
//! former key gets no further one.

use std::num::NonZeroU16;
use std::path::Path;

use larder_store::api::OpenOptions;
use larder_store::error::StoreError;
use larder_store::recovery::{Found, Whole};
use larder_store::store::opening::{Opening, open_volumes};
use larder_store::volume::Access;

use super::compact::{Compacted, Compaction, planned};
use super::order::{Plan, order};
use super::owner::{Progress, sizes, stored_blocks};

/// Gives all tenants of the store at `path` new keys, or one of them, and encrypts their pages
/// anew. With `dry_run` nothing is written.
///
/// # Errors
/// [`StoreError::Locked`] when a process has it open, [`StoreError::Unsound`] when structures are
/// damaged, [`StoreError::Usage`] if the store is not encrypted, [`StoreError::Keyring`] if it has
/// no room for the keys or no such tenant; else as for an open. After any error the store is as
/// after a crash: sound.
pub fn rekey(
    path: &Path,
    options: &OpenOptions,
    tenant: Option<&str>,
    dry_run: bool,
    progress: &mut Progress<'_>,
) -> Result<Compacted, StoreError> {
    let access = match dry_run {
        true => Access::Held,
        false => Access::Exclusive,
    };
    let (volumes, disk) = open_volumes(path, options, access)?;
    let mut opening: Opening<Whole> = Opening::new(volumes, disk, options)?;
    let plan = match renewed(path, &mut opening, tenant, dry_run) {
        Ok(plan) if !dry_run => plan,
        outcome => {
            opening.give_up();
            return outcome.map(|plan| planned(&plan));
        }
    };
    let done = Compaction::begin(opening, plan, &[], options)?.run(progress)?;
    if done.left_pages == 0 && !done.interrupted {
        let (mut volumes, disk) = open_volumes(path, options, Access::Exclusive)?;
        let erased = volumes.erase_former_keys(disk.as_ref(), tenant);
        disk.shutdown();
        for (_, volume) in volumes.present() {
            volume.unlock();
        }
        erased?;
    }
    Ok(done)
}

/// Renews the keys, as a plan in a dry run, and plans the moves.
fn renewed(
    path: &Path,
    opening: &mut Opening<Whole>,
    tenant: Option<&str>,
    dry_run: bool,
) -> Result<Plan, StoreError> {
    let Some(keys) = opening.volumes.keys().cloned() else {
        return Err(StoreError::Usage(format!(
            "{}: the store is not encrypted, and has no keys to renew",
            path.display()
        )));
    };
    if !opening.recovery.damage.is_empty() {
        return Err(StoreError::Unsound {
            path: path.to_owned(),
            flaws: opening.recovery.damage.len(),
        });
    }
    if dry_run {
        let ring = opening.volumes.keys_to_renew(tenant)?;
        return Ok(plan(opening, |slot| ring.renewed(slot).is_some()));
    }
    opening.volumes.renew_keys(opening.disk.as_ref(), tenant)?;
    Ok(plan(opening, |slot| keys.is_renewed(slot)))
}

/// All pages of former keys, in the order in which they should lie.
fn plan(opening: &Opening<Whole>, is_former: impl Fn(NonZeroU16) -> bool) -> Plan {
    let has_former_key = |page: &Found<Whole>| {
        let found = opening.index.locate(page.slot, &page.extra.key);
        let seal = found.and_then(|found| found.proof.seal);
        seal.is_some_and(|seal| is_former(seal.slot))
    };
    let sizes = sizes(&opening.recovery.recovered.namespaces);
    let steps = order(&opening.pages).into_iter().map(|step| step.page);
    let pages: Vec<usize> = steps
        .filter(|page| has_former_key(&opening.pages[*page]))
        .collect();
    let blocks = pages
        .iter()
        .map(|page| u64::from(stored_blocks(&sizes, &opening.pages[*page])));
    Plan {
        page_blocks: blocks.sum(),
        pages,
        ..Plan::default()
    }
}
