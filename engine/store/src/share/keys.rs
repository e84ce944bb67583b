//! Lists of keys as their bytes, in place. A list of 131,072 keys is four megabytes: copying it
//! would take longer than looking up the first thousands of them.

use larder_format::PageKey;

use super::wire::{KEY_BYTES, KEYS_MAX};

/// The bytes of some keys, one after another.
pub fn blob(keys: &[PageKey]) -> &[u8] {
    // SAFETY: a key is its bytes and nothing else (`repr(transparent)`), so the slice is
    // `size_of_val` initialised bytes.
    unsafe { std::slice::from_raw_parts(keys.as_ptr().cast(), size_of_val(keys)) }
}

/// The keys of a blob; `None` when its length does not fit.
pub fn keys_of(blob: &[u8]) -> Option<&[PageKey]> {
    let (keys, rest) = blob.as_chunks::<KEY_BYTES>();
    if !rest.is_empty() || keys.len() > KEYS_MAX {
        return None;
    }
    // SAFETY: a key is its bytes and nothing else (`repr(transparent)`): any bytes are a key, at
    // any alignment.
    Some(unsafe { std::slice::from_raw_parts(keys.as_ptr().cast(), keys.len()) })
}

const _: () = assert!(size_of::<PageKey>() == KEY_BYTES && align_of::<PageKey>() == 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_same_as_bytes_and_back() {
        let keys: Vec<PageKey> = (0..100_u8).map(|n| PageKey::from_bytes([n; 32])).collect();
        let bytes = blob(&keys);
        assert_eq!(bytes.len(), 3200);
        assert!(bytes.chunks(32).zip(0_u8..).all(|(key, n)| key == [n; 32]));
        assert_eq!(keys_of(bytes), Some(&keys[..]));
        assert_eq!(keys_of(&[]), Some(&[][..]));
        assert_eq!(keys_of(&bytes[1..]), None);
        assert_eq!(keys_of(&vec![0; (KEYS_MAX + 1) * 32]), None);
    }
}
