#![allow(clippy::unwrap_used)]

use super::*;

fn kept(vault: &Vault, byte: u8) -> Key {
    let write = |key: &mut [u8; KEY_BYTES]| {
        *key = [byte; KEY_BYTES];
        Ok::<_, VaultError>(())
    };
    vault.keep(write).unwrap()
}

#[test]
fn a_key_is_wiped_when_its_last_clone_goes() {
    let vault = Vault::new();
    let first = kept(&vault, 1);
    let second = kept(&vault, 2);
    let again = second.clone();
    drop(second);
    assert_eq!(again.with(|key| *key).unwrap(), [2; KEY_BYTES]);
    assert_eq!(vault.keys(), 2);
    drop(again);
    assert_eq!(vault.keys(), 1);
    let pages = vault.pages.read();
    let bytes = pages.iter().flat_map(|page| page.memory.bytes().iter());
    assert_eq!(bytes.filter(|byte| **byte == 2).count(), 0);
    drop(pages);
    assert_eq!(first.with(|key| *key).unwrap(), [1; KEY_BYTES]);
}

#[test]
fn many_keys_take_more_pages_and_give_their_places_back() {
    let vault = Vault::new();
    let keys: Vec<Key> = (0..=250).map(|byte| kept(&vault, byte)).collect();
    for (key, byte) in keys.iter().zip(0..) {
        assert_eq!(key.with(|key| *key).unwrap(), [byte; KEY_BYTES]);
    }
    assert_eq!(vault.pages.read().len(), 2);
    drop(keys);
    let _keys: Vec<Key> = (0..=250).map(|byte| kept(&vault, byte)).collect();
    assert_eq!(vault.pages.read().len(), 2);
}

#[test]
fn a_key_that_is_not_written_leaves_nothing() {
    let vault = Vault::new();
    let refused = vault.keep(|key| {
        *key = [3; KEY_BYTES];
        Err(VaultError::Cipher(CipherError))
    });
    assert!(refused.is_err());
    assert_eq!(vault.keys(), 0);
    let pages = vault.pages.read();
    let mut bytes = pages.iter().flat_map(|page| page.memory.bytes().iter());
    assert!(bytes.all(|byte| *byte != 3));
}

/// What the kernel says of the memory of the keys: locked, in no dump, wiped in a forked child.
#[test]
fn the_memory_is_locked_and_in_no_dump_and_wiped_on_fork() {
    let vault = Vault::new();
    let _key = kept(&vault, 1);
    let start = vault.pages.read().first().unwrap().memory.bytes().as_ptr() as usize;
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    // Neighbours with the same flags are one mapping.
    let has = |line: &str| {
        let range = line.split(' ').next()?.split_once('-')?;
        let [from, to] = [range.0, range.1].map(|at| usize::from_str_radix(at, 16).ok());
        Some((from?..to?).contains(&start))
    };
    let mut lines = maps.lines().skip_while(|line| has(line) != Some(true));
    let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
    for flag in ["lo", "dd", "wf"] {
        assert!(flags.split(' ').any(|word| word == flag), "{flag}: {flags}");
    }
}

/// A page of zeros, as a forked child has it, is never taken for a key.
#[test]
fn a_wiped_page_gives_no_key() {
    let vault = Vault::new();
    let key = kept(&vault, 1);
    vault
        .pages
        .write()
        .first_mut()
        .unwrap()
        .memory
        .bytes_mut()
        .fill(0);
    assert!(matches!(key.with(|key| *key), Err(VaultError::Forked)));
    let again = vault.keep(|_| Ok::<_, VaultError>(()));
    assert!(matches!(again, Err(VaultError::Forked)));
}
