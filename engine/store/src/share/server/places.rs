//! The places of the volumes: whether each path still leads to the file that this process serves.
//!
//! A file that is deleted or replaced stays in service, and its clients stay. But no other process
//! finds it by its path. Another store at the path has a lock of its own, and an owner of its own
//! as soon as a process opens it.
//!
//! Invariants:
//! - No look waits for a file system. A process that waits for one that hangs cannot be killed, so
//!   its locks would stay. So a link that leads elsewhere is noticed only where the kernel knows
//!   the new file without asking the file system.
//! - Only evidence counts. A path that cannot be looked at, for lack of permissions for example, is
//!   no sign of a displaced file.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::runtime::Mutex;
use larder_base::system::files::{self, FileId, Handle};

use crate::error::{StoreError, io_error};
use crate::share::wire::DisplacedVolume;
use crate::volume::{Volume, Volumes};

/// What became of a displaced file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Gone,
    Replaced,
    Renamed,
}

impl Fate {
    fn as_str(self) -> &'static str {
        match self {
            Fate::Gone => {
                "no file is at its path: it was deleted, or it or its directory was moved"
            }
            Fate::Replaced => "another file is at its path: it was replaced",
            Fate::Renamed => "its file was deleted, replaced or moved",
        }
    }
}

/// A volume's path, and the file that it led to when the store was opened.
struct Place {
    path: PathBuf,
    file: Arc<Handle>,
    id: FileId,
    /// The name of the open file at that time.
    name: Option<PathBuf>,
}

/// See the module.
pub(super) struct Places {
    places: Vec<Place>,
    /// The root directory of this process.
    root: Option<FileId>,
    known: Mutex<Known>,
}

/// The outcome of the last look.
struct Known {
    /// By place.
    fates: Vec<Option<Fate>>,
    /// A path that could not be looked at was logged.
    is_unseen_logged: bool,
}

impl Place {
    fn of(volume: &Volume) -> Option<Place> {
        let (id, _) = files::identify(&volume.file).ok()?;
        Some(Place {
            path: files::absolute(&volume.path),
            file: volume.file.clone(),
            id,
            name: files::name_now(&volume.file).ok(),
        })
    }

    /// `None` while the file is in its place. `is_here`: paths begin where they began when the
    /// store was opened.
    fn look(&self, is_here: bool) -> io::Result<Option<Fate>> {
        let found = files::look_in_cache(&self.path);
        match found {
            Ok(found) if found == self.id => Ok(None),
            _ if !is_here => Err(io::Error::other("the root directory has changed")),
            Ok(_) => Ok(Some(Fate::Replaced)),
            Err(error) if is_nowhere(&error) => Ok(Some(Fate::Gone)),
            Err(_) => {
                let name = files::name_now(&self.file)?;
                Ok((self.name.as_ref() != Some(&name)).then_some(Fate::Renamed))
            }
        }
    }
}

fn is_nowhere(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn root() -> Option<FileId> {
    files::look_in_cache(Path::new("/")).ok()
}

impl Places {
    /// The places of the volumes of a store that has just been opened.
    pub(super) fn of(volumes: &Volumes) -> Places {
        let places = volumes
            .present()
            .filter_map(|(_, volume)| Place::of(volume));
        let places: Vec<Place> = places.collect();
        Places {
            root: root(),
            known: Mutex::new(Known {
                fates: vec![None; places.len()],
                is_unseen_logged: false,
            }),
            places,
        }
    }

    /// Looks at all places, and logs changes.
    pub(super) fn look(&self) {
        let is_here = root() == self.root;
        for (index, place) in self.places.iter().enumerate() {
            let fate = place.look(is_here);
            let mut known = self.known.lock();
            let path = place.path.display();
            match fate {
                Ok(fate) if fate == known.fates[index] => {}
                Ok(fate) => {
                    let before = std::mem::replace(&mut known.fates[index], fate);
                    drop(known);
                    log(&path, before, fate);
                }
                Err(error) if !std::mem::replace(&mut known.is_unseen_logged, true) => {
                    tracing::info!(
                        %error,
                        "{path}: cannot be looked at: a volume that is deleted or replaced would \
                         not be noticed (logged once)"
                    );
                }
                Err(_) => {}
            }
        }
    }

    /// The volumes that were displaced at the last look.
    pub(super) fn displaced(&self) -> Vec<DisplacedVolume> {
        let known = self.known.lock();
        let found = self.places.iter().zip(&known.fates);
        let found = found.filter_map(|(place, fate)| Some((place, (*fate)?)));
        found
            .map(|(place, fate)| DisplacedVolume {
                path: place.path.clone(),
                reason: fate.as_str().to_owned(),
            })
            .collect()
    }

    /// Whether the path of the first volume leads to its file. Asks the file system.
    ///
    /// # Errors
    /// The path cannot be looked at.
    pub(super) fn is_first_there(&self) -> Result<bool, StoreError> {
        let Some(first) = self.places.first() else {
            return Ok(false);
        };
        let found = files::look(&first.path);
        let found = found.map_err(|error| io_error("looking for the store", &first.path, error))?;
        Ok(found.id == first.id)
    }

    /// Whether the first volume was displaced at the last look.
    pub(super) fn is_first_displaced(&self) -> bool {
        self.known.lock().fates.first().is_some_and(Option::is_some)
    }
}

fn log(path: &std::path::Display<'_>, before: Option<Fate>, now: Option<Fate>) {
    match now {
        // A move that takes several looks is one event.
        Some(_) if before.is_some() => {}
        Some(fate) => tracing::warn!(
            "{path}: a volume is displaced: {}. This process serves the former file, which no \
             other process finds. Stop this process and serve the store at the path, or move the \
             former file back",
            fate.as_str()
        ),
        None => tracing::info!("{path}: the volume is in its place again"),
    }
}
