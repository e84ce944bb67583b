//! Later attempts to attach to a store, for a server started without one (`on_error` is `miss`).
//!
//! One thread per backend. It sleeps between attempts, twice as long after each, and ends with the
//! first success or when the backend is closed. Until then everything is a miss. Afterwards pages
//! are found and stored as if the store had always been there.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder_handle::config::Config;
use larder_handle::store::Handle;

use super::Backend;

/// Longest pause between two attempts, unless the configured first pause is longer.
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// The sender to the thread, which ends when this is dropped.
pub(super) struct Retry(Sender<Sender<bool>>);

/// Starts the thread.
pub(super) fn start(backend: &Arc<Backend>, config: &Config) {
    let (asks, asked) = mpsc::channel();
    let (weak, config) = (Arc::downgrade(backend), config.clone());
    let thread = std::thread::Builder::new()
        .name("larder-retry".to_owned())
        .spawn(move || run(&weak, &config, &asked));
    match thread {
        Ok(_) => *backend.retry.lock() = Some(Retry(asks)),
        Err(error) => tracing::warn!(%error, "no further attempt to attach to a store"),
    }
}

fn run(backend: &Weak<Backend>, config: &Config, asked: &Receiver<Sender<bool>>) {
    let mut pause = config.retry;
    loop {
        let answer = match asked.recv_timeout(pause) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let is_over = attempt(backend, config);
        if let Some(answer) = answer {
            // The caller may have given up waiting.
            let _ = answer.send(is_over);
        }
        if is_over {
            return;
        }
        pause = (pause * 2).min(PAUSE_MAX.max(config.retry));
    }
}

/// Makes one attempt. Returns whether no further attempt is needed.
fn attempt(backend: &Weak<Backend>, config: &Config) -> bool {
    let page_bytes = backend.upgrade().and_then(|backend| backend.largest_page());
    let store = match Handle::attach(config, page_bytes, true) {
        Ok(store) => Arc::new(store),
        Err(error) => {
            tracing::info!(%error, "the store still cannot be opened");
            return false;
        }
    };
    let (volume, pages) = (store.volume().display(), store.stats().pages);
    tracing::info!(%volume, pages, "attached to a store");
    for remark in store.remarks() {
        tracing::warn!("a remark on the store: {remark}");
    }
    let too_late = match backend.upgrade() {
        Some(backend) => backend.enter(store).err(),
        None => Some(store),
    };
    if let Some(store) = too_late
        && let Err(error) = store.close()
    {
        tracing::warn!(%error, "the store was not closed cleanly");
    }
    true
}

impl Backend {
    /// Makes a backend without a store try at once, and waits for the result. Returns whether no
    /// further attempt is needed.
    pub fn try_again(&self) -> bool {
        if self.is_inherited() {
            return true;
        }
        let (answer, answered) = mpsc::channel();
        let asked = match &*self.retry.lock() {
            Some(Retry(asks)) => asks.send(answer).is_ok(),
            None => false,
        };
        // The thread ends when no further attempt is needed.
        !asked || answered.recv().unwrap_or(true)
    }
}
