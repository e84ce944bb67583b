//! The pages of an engine after a restart, and after an exit without `close`.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use larder_engine::report;
use larder_tiers::config::WritePolicy;
use larder_tiers::{PrefixCache, PrefixOptions};
use nix::sys::signal::{Signal, raise};

use super::engine::{PAGE, WORDS};
use super::{ANSWER, answer, put_of, serve, toy};

const STORE: &str = "LARDER_ENGINE_LIFE";

fn prompt(pages: usize, first: u64) -> Vec<u64> {
    let tokens = 0..(pages * PAGE + 3) as u64;
    tokens
        .map(|token| (first + token * token) % WORDS)
        .collect()
}

fn open(store: &Path) -> PrefixCache {
    PrefixCache::open(store, 128 << 20, &toy().model(), 60, 60).unwrap()
}

fn store() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    (directory, path)
}

/// Runs the rest of a test in a process of its own, which must end by SIGKILL.
fn in_another_process(test: &str, store: &Path) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("lives::{test}"), "--nocapture"])
        .env(STORE, store)
        .status();
    let signal = std::os::unix::process::ExitStatusExt::signal(&child.unwrap());
    assert_eq!(signal, Some(Signal::SIGKILL as i32));
}

/// The engine keeps a sequence and then calls nothing. 50 pages are more than half of L2, which is
/// the most that is queued for L3 at once.
#[test]
fn an_engine_that_sleeps_has_its_pages_in_l3() {
    let test = "an_engine_that_sleeps_has_its_pages_in_l3";
    if let Some(path) = std::env::var_os(STORE) {
        let cache = open(Path::new(&path));
        let mut sequence = cache.begin(&prompt(50, 0)).unwrap();
        answer(&toy(), &mut sequence, &prompt(50, 0));
        sequence.keep().unwrap();
        let kept = Instant::now();
        put_of(&cache, 50);
        println!("all pages were in L3 after {:?}", kept.elapsed());
        raise(Signal::SIGKILL).unwrap();
    }
    let (_directory, path) = store();
    in_another_process(test, &path);
    let cache = open(&path);
    // A prefetch takes at most half of L2.
    assert_eq!(serve(&cache, &toy(), &prompt(50, 0)).l3, 30 * PAGE);
    cache.close().unwrap();
}

#[test]
fn an_exit_without_close_loses_only_pages_that_were_on_their_way() {
    let test = "an_exit_without_close_loses_only_pages_that_were_on_their_way";
    if let Some(path) = std::env::var_os(STORE) {
        let cache = open(Path::new(&path));
        serve(&cache, &toy(), &prompt(20, 0));
        put_of(&cache, 20);
        // These are kept a moment before the exit.
        serve(&cache, &toy(), &prompt(20, 1));
        raise(Signal::SIGKILL).unwrap();
    }
    let (_directory, path) = store();
    in_another_process(test, &path);
    let cache = open(&path);
    assert_eq!(serve(&cache, &toy(), &prompt(20, 0)).l3, 20 * PAGE);
    let late = serve(&cache, &toy(), &prompt(20, 1));
    println!("{} of {} late tokens were in L3", late.l3, 20 * PAGE);
    cache.close().unwrap();
}

#[test]
fn close_keeps_the_pages_of_the_last_moment() {
    let (_directory, path) = store();
    let cache = open(&path);
    serve(&cache, &toy(), &prompt(20, 0));
    cache.close().unwrap();
    let cache = open(&path);
    assert_eq!(serve(&cache, &toy(), &prompt(20, 0)).l3, 20 * PAGE);
    cache.close().unwrap();
}

#[test]
fn tokens_are_counted_once_a_request() {
    let (_directory, path) = store();
    let cache = open(&path);
    serve(&cache, &toy(), &prompt(10, 0));
    cache.close().unwrap();
    let mut options = PrefixOptions::new(&toy().model(), 60, 60);
    options.config.prefetch.break_even_tokens_per_second = NonZeroU32::new(1000);
    let cache = options.open(&path, 128 << 20).unwrap();
    let tokens = || report(&path).unwrap().totals.spaces.total().tokens;
    // The first half is in L3, the whole prompt in L1 from then on.
    let longer: Vec<u64> = prompt(10, 0)[..5 * PAGE]
        .iter()
        .copied()
        .chain(prompt(5, 3))
        .collect();
    serve(&cache, &toy(), &longer);
    let page = PAGE as u64;
    let counted = tokens();
    assert_eq!((counted.requests, counted.served), (1, 5 * page));
    assert_eq!(counted.saved_ms, 5 * page);
    assert_eq!((counted.found, counted.not_found), (5 * page, 5 * page));
    serve(&cache, &toy(), &longer);
    assert_eq!(tokens(), counted);
    cache.close().unwrap();
}

#[test]
fn a_prompt_longer_than_l2_gets_from_l3_what_fits() {
    let (_directory, path) = store();
    let cache = open(&path);
    serve(&cache, &toy(), &prompt(50, 0));
    cache.close().unwrap();
    for (l2_pages, percent, pages) in [(20, 50, 10), (20, 100, 20)] {
        let options = PrefixOptions::new(&toy().model(), 60, l2_pages).with(|o| {
            o.config.write_policy = WritePolicy::WriteBack;
            o.config.prefetch.l2_percent_max = percent;
        });
        let cache = options.open(&path, 128 << 20).unwrap();
        let cached = serve(&cache, &toy(), &prompt(50, 0));
        assert_eq!((cached.l3, cached.tokens()), (pages * PAGE, pages * PAGE));
        assert!(cached.tokens() < 50 * PAGE + ANSWER);
        cache.close().unwrap();
    }
}
