//! A volume that is slow or hangs, over a file of another file system.

use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fuser::Errno;

use crate::fuse::{self, Mount, OneFile};
use crate::support::honest::skipped;

/// How the volume answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    Full,
    /// At so many bytes per second.
    Slow(u64),
    /// Not at all.
    Hung,
}

/// A mounted volume.
pub struct Ill {
    served: Arc<Served>,
    _mount: Mount,
}

pub struct Served {
    file: File,
    bytes: u64,
    pace: Mutex<Pace>,
    changed: Condvar,
}

impl Ill {
    /// Puts a file system of this kind between the store and its volume: `path` becomes a link to
    /// the file in it. `None` where there is no FUSE, which is reported.
    pub fn mount(path: &Path) -> Option<Ill> {
        let backing = path.with_extension("backing");
        let mounted = path.with_extension("mounted");
        std::fs::rename(path, &backing).unwrap();
        std::fs::create_dir(&mounted).unwrap();
        let file = File::options().read(true).write(true).open(&backing);
        let file = file.unwrap();
        let served = Arc::new(Served {
            bytes: file.metadata().unwrap().len(),
            file,
            pace: Mutex::new(Pace::Full),
            changed: Condvar::new(),
        });
        match fuse::mount(served.clone(), &mounted) {
            Ok(mount) => {
                symlink(mounted.join(fuse::NAME), path).unwrap();
                Some(Ill {
                    served,
                    _mount: mount,
                })
            }
            Err(error) => {
                let why = format!("no FUSE file system can be mounted: {error}");
                skipped("incidents of a slow and of a hung volume", why);
                None
            }
        }
    }

    /// Answers at this pace until the illness is dropped: else a test that fails would wait for
    /// processes that wait for the volume.
    pub fn falls(&self, pace: Pace) -> Illness<'_> {
        self.served.set(pace);
        Illness(&self.served)
    }
}

/// See [`Ill::falls`].
pub struct Illness<'a>(&'a Served);

impl Drop for Illness<'_> {
    fn drop(&mut self) {
        self.0.set(Pace::Full);
    }
}

impl Served {
    fn set(&self, pace: Pace) {
        *self.pace.lock().unwrap() = pace;
        self.changed.notify_all();
    }

    /// Waits as long as the volume takes for so many bytes.
    fn wait(&self, bytes: usize) {
        let pace = self.pace.lock().unwrap();
        let is_hung = |pace: &mut Pace| *pace == Pace::Hung;
        let pace = *self.changed.wait_while(pace, is_hung).unwrap();
        if let Pace::Slow(rate) = pace {
            // The file system itself is the slow device: this is no wait of the test.
            let time = Duration::from_secs_f64(bytes as f64 / rate as f64);
            let pace = self.pace.lock().unwrap();
            let is_slow = |now: &mut Pace| *now == Pace::Slow(rate);
            drop(
                self.changed
                    .wait_timeout_while(pace, time, is_slow)
                    .unwrap(),
            );
        }
    }
}

impl OneFile for Served {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let end = self.bytes.min(offset + u64::from(size));
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(offset)).unwrap()];
        self.wait(bytes.len());
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<u32, Errno> {
        self.wait(bytes.len());
        self.file.write_all_at(bytes, offset)?;
        Ok(u32::try_from(bytes.len()).unwrap())
    }

    fn sync(&self) -> Result<(), Errno> {
        self.wait(0);
        Ok(())
    }
}
