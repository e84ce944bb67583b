//! Text that people and programs write: trace lines, keys, sizes, durations.

use std::num::NonZeroUsize;
use std::path::Path;

use larder_engine::format::{PageKey, StoreId, TokenUnits, page_keys};
use larder_tools::size::{ByteSize, duration};
use larder_tools::trace::Trace;

/// Request traces, page keys in hex, and the keys of the tokens in the input.
///
/// # Panics
/// If a reader returns a value that it should have rejected: here, and in the function below.
pub fn text(data: &[u8]) {
    let mut failed = false;
    for request in Trace::new(Path::new("trace"), data) {
        assert!(!failed, "a trace continues after an error");
        if let Err(error) = &request {
            failed = true;
            assert!(error.to_string().starts_with("trace"), "{error}");
        }
    }
    if let Ok(text) = std::str::from_utf8(data) {
        if let Ok(key) = text.parse::<PageKey>() {
            assert_eq!(key.to_string(), text, "a key has two spellings");
        }
        let _ = text.parse::<StoreId>().map_err(|error| error.to_string());
    }
    keys(data);
}

fn keys(data: &[u8]) {
    let (words, rest) = data.as_chunks::<8>();
    let tokens: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let page = rest.first().map_or(0, |byte| usize::from(*byte));
    let page = NonZeroUsize::new(page).unwrap_or(NonZeroUsize::MIN);
    for (units, count) in [
        (TokenUnits::Single, tokens.len()),
        (TokenUnits::Bigram, tokens.len().saturating_sub(1)),
    ] {
        let keys = page_keys(&tokens, page, None, units);
        assert_eq!(keys.len(), count / page.get(), "keys of {units:?}");
        // A chain can be continued from any of its keys.
        if let (Some(first), TokenUnits::Single) = (keys.first(), units) {
            let rest = tokens.get(page.get()..).unwrap_or_default();
            assert_eq!(keys[1..], page_keys(rest, page, Some(*first), units));
        }
    }
}

/// Sizes and durations of the command line.
pub fn sizes(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match text.parse::<ByteSize>() {
        Ok(size) => {
            let exact = format!("{}B", size.0);
            assert_eq!(
                exact.parse(),
                Ok(size),
                "a size in bytes does not parse to itself"
            );
            let shown: Result<ByteSize, _> = size.to_string().parse();
            let off = shown.map(|shown| shown.0.abs_diff(size.0));
            // One decimal is printed. Past the largest unit even that is exact to a twentieth.
            assert!(
                off.as_ref().is_ok_and(|off| *off <= size.0 / 10) || size.0 > u64::MAX / 20 * 19,
                "{size} is printed for {} bytes",
                size.0
            );
        }
        Err(error) => {
            let _ = error.to_string();
        }
    }
    let _ = duration(text);
}
