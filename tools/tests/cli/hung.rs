//! Metrics of a store with a volume that hangs.
//!
//! Needs FUSE and the right to mount. Without them it reports the skip and passes.

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::sync::{Arc, Mutex};

use fuser::{BackgroundSession, Config, Errno, Filesystem, INodeNo, ReplyEntry, Request};

use super::metrics::serve;
use super::support::observe::Exporter;
use super::*;

/// The lookups without an answer; `None` when it hangs no more.
type Waiting = Arc<Mutex<Option<Vec<ReplyEntry>>>>;

/// A file system that answers no lookup.
struct Hung(Waiting);

impl Filesystem for Hung {
    fn lookup(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        match &mut *self.0.lock().unwrap() {
            Some(waiting) => waiting.push(reply),
            None => reply.error(Errno::EIO),
        }
    }
}

/// Answers all lookups when it is dropped: a process that waits for one cannot be killed.
struct Release(Waiting);

impl Drop for Release {
    fn drop(&mut self) {
        for reply in self.0.lock().unwrap().take().into_iter().flatten() {
            reply.error(Errno::EIO);
        }
    }
}

fn mount(at: &Path) -> Option<(BackgroundSession, Release)> {
    std::fs::create_dir(at).unwrap();
    let waiting = Waiting::new(Mutex::new(Some(Vec::new())));
    match fuser::spawn_mount(Hung(waiting.clone()), at, &Config::default()) {
        Ok(session) => Some((session, Release(waiting))),
        Err(error) => {
            let why = format!("no FUSE file system can be mounted: {error}");
            skipped("metrics of a store with a volume that hangs", why);
            None
        }
    }
}

/// Moves a volume to a device that hangs. A process that has it open notices nothing.
fn hang(volume: &Path, mounted: &Path) {
    std::fs::rename(volume, volume.with_extension("moved")).unwrap();
    symlink(mounted.join("volume"), volume).unwrap();
}

#[test]
fn an_exporter_answers_while_a_volume_hangs() {
    let directory = directory();
    let [first, second] = ["store", "second"].map(|name| directory.path().join(name));
    let create = ["create", text(&first), "--size", STORE_SIZE];
    json(&[&create[..], &["--volume", text(&second)]].concat());
    let mounted = directory.path().join("mounted");
    let Some((_session, release)) = mount(&mounted) else {
        return;
    };
    let owner = serve(text(&first));
    let exporter = Exporter::of(text(&first));
    // Before both processes end.
    let _release = release;
    hang(&second, &mounted);
    // More scrapes than questions at a time.
    for _ in 0..6 {
        assert_eq!(exporter.scrape()["larder_up"], 1.0);
    }
    drop(owner);
    hang(&first, &mounted);
    let (status, reason) = exporter.ask("GET", "/metrics");
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    assert!(reason.contains("hangs"), "{reason}");
}
