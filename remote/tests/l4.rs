//! Remotes by configuration alone, beneath a store that several processes share.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::time::Duration;

use common::chain;
use common::member::{Home, RUN_PAGES, eventually, files};
use larder_engine::PageStore;
use larder_remote::l4::L4Config;

#[test]
fn numbers_and_times_of_zero_are_refused_by_their_key() {
    let refused = |change: fn(&mut L4Config)| {
        let mut config = L4Config {
            urls: vec!["file:///some/where".to_owned()],
            is_unsigned: true,
            ..L4Config::default()
        };
        change(&mut config);
        let error = config.connect().err();
        error.map_or_else(String::new, |error| error.to_string())
    };
    assert_eq!(refused(|_| {}), "");
    assert!(refused(|config| config.run_tokens = 0).contains("l4_run_tokens"));
    assert!(refused(|config| config.timeout = Duration::ZERO).contains("l4_timeout"));
    assert!(refused(|config| config.refresh = Duration::ZERO).contains("--l4-refresh"));
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let config = L4Config {
            prefill_rate: Some(rate),
            ..L4Config::default()
        };
        assert_eq!(config.not_positive(), Some("l4_prefill_rate"));
    }
}

/// The memory of the former owner is newer than the attachment of the next one.
#[test]
fn a_process_that_takes_over_knows_the_puts_of_the_former_owner() {
    let home = Home::new();
    let (owner, next) = (home.member(), home.member());
    let pages = chain(1, RUN_PAGES);
    owner.put(&pages);
    owner.close();
    let length = || fs::metadata(home.memory()).unwrap().len();
    let before = length();
    eventually(|| {
        let found = next.store.longest_prefix(next.id, &pages);
        found == RUN_PAGES && files(&home.remote) == 1
    });
    next.close();
    assert_eq!(length(), before);
}
