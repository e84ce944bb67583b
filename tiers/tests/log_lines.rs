//! A counter of failures grows with a log line. One test in a process of its own, because the log
//! of a process is shared by its tests.
#![allow(clippy::unwrap_used, reason = "a broken expectation is the finding")]

#[path = "prefix/memory.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod memory;

use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_kernels::KvShape;
use larder_tiers::{Model, PrefixOptions};
use memory::Memory;

/// Longer than the test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_counter_of_failures_grows_with_one_log_line() {
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_writer(move || writer.clone());
    tracing::subscriber::set_global_default(log.finish()).unwrap();
    let l3 = Arc::<Memory>::default();
    l3.fails.store(1, Ordering::Relaxed);
    let model = Model::new("a", "", "f32", KvShape::mha(1, 1, 4, 4, 4).unwrap());
    let cache = PrefixOptions::new(&model, 20, 20).over(Some(l3)).unwrap();
    for first in [0, 100] {
        let prompt: Vec<u64> = (first..first + 17).collect();
        let mut sequence = cache.begin(&prompt).unwrap();
        sequence.computed(prompt.len()).unwrap();
        assert_eq!(sequence.keep().unwrap(), 16);
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    }
    assert!(cache.stats().unwrap().put_failed >= 4);
    cache.close().unwrap();
    let lines = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let said = lines.matches("L3 did not store pages").count();
    assert_eq!(said, 1, "{lines}");
}
