//! `larder doctor` for the configuration of an engine: checks before a start whether a server with
//! this configuration would get its store.
//!
//! Reports the configuration first, then the state of the configured path. The machine (io_uring,
//! seccomp, lockable memory, huge pages, the disk) is left to `larder doctor`. Changes nothing.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use larder_core::counters::Counted;
use larder_disk::probe::{self, Fact, Level};
use larder_engine::{Settings, Stats, StoreError, create};
use larder_format::BLOCK_BYTES;
use larder_handle::config::{Config, ConfigError};
use larder_handle::place::{Misfit, misfit, open_options, options, unmounted, volume_of};
use larder_store::fit::largest_page;
use larder_store::share;
use larder_store::volume::Volumes;
use larder_tools::cli;
use larder_tools::size::{ByteSize, SizeError};
use rustix::fs::Access;

/// The facts about a configuration, for a server with pages of `page_bytes`, and the path to check
/// further. `engines` are the facts about the keys of the engine itself. `derives`: the engine's
/// side derives a weights tag if none is set.
#[must_use]
pub fn examine(
    parsed: Result<Config, ConfigError>,
    engines: Vec<Fact>,
    page_bytes: Option<u64>,
    derives: bool,
) -> (Vec<Fact>, Option<PathBuf>) {
    let mut config = match parsed {
        Ok(config) => config,
        Err(error) => return (vec![Fact::fail("config", error.to_string())], None),
    };
    let mut facts = vec![Fact::ok("config", "every key is known")];
    facts.extend(engines);
    match &config.weights_tag {
        Some(tag) => facts.push(Fact::ok(
            "weights_tag",
            format!("`{tag}`: change it whenever the weights change"),
        )),
        None if derives => facts.push(Fact::ok(
            "weights_tag",
            "derived from the server's configuration and the weight files when it starts",
        )),
        None => {}
    }
    if let Some(what) = config.resolve() {
        facts.push(Fact::warn("path", what));
    }
    facts.extend(place(&config, page_bytes));
    let volume = volume_of(&config.path);
    let what = format!("the store is {}", volume.display());
    facts.push(Fact::ok("path", what));
    // A future store is judged by the closest directory that exists.
    let mut looks = std::iter::once(volume.as_path()).chain(config.path.ancestors());
    let look = looks.find(|look| look.exists()).map(Path::to_owned);
    (facts, look)
}

/// Checks the configured path.
fn place(config: &Config, page_bytes: Option<u64>) -> Vec<Fact> {
    let path = &config.path;
    let mut facts = Vec::new();
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.starts_with("/dev") => {
            let what = format!("{} does not exist yet and would be created", path.display());
            facts.push(Fact::ok("path", what));
            if let Some(above) = path.ancestors().find(|above| above.is_dir()) {
                let what = format!(
                    "below {}, the closest directory that exists",
                    above.display()
                );
                facts.push(Fact::ok("path", what));
                facts.push(writable(above));
                facts.extend(no_disk(above));
                facts.extend(room(config, above, page_bytes));
            }
            return facts;
        }
        Err(error) => {
            let what = format!("{}: {error}; check the path", path.display());
            return vec![Fact::fail("path", what)];
        }
    };
    let is_device = metadata.file_type().is_block_device();
    if !is_device && !metadata.is_dir() {
        let what = format!(
            "{} is neither a directory nor a block device",
            path.display()
        );
        return vec![Fact::fail("path", what)];
    }
    facts.push(writable(path));
    if !is_device {
        facts.extend(container(path));
    }
    let volume = volume_of(path);
    if !is_device && volume.exists() {
        facts.extend(unwritable(&volume));
    }
    if let Ok(report) = share::report(&volume) {
        let what = format!(
            "{} is served: {} pages in {}; a server would be another client",
            volume.display(),
            report.stats.pages,
            ByteSize(report.stats.capacity_bytes)
        );
        facts.push(Fact::ok("store", what));
        facts.extend(size(config, report.stats.capacity_bytes));
        facts.push(settings(config, report.settings));
        facts.extend(unread(&report));
        facts.push(pages(&volume, &report.stats, page_bytes));
    } else if !is_device && volume.exists() {
        let bytes = fs::metadata(&volume).map_or(0, |metadata| metadata.len());
        let what = format!("{} exists and is not in use", volume.display());
        facts.push(Fact::ok("store", what));
        facts.extend(size(config, bytes));
        facts.extend(closed_pages(&volume, bytes, page_bytes));
    } else if !is_device {
        facts.extend(no_disk(path));
        facts.extend(room(config, path, page_bytes));
    }
    facts
}

fn writable(path: &Path) -> Fact {
    match rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => Fact::ok("path", format!("{} can be written", path.display())),
        Err(error) => Fact::fail(
            "path",
            format!(
                "{}: {error}; change its owner or permissions, or its mount",
                path.display()
            ),
        ),
    }
}

/// The file of a store that is not writable, independent of the permissions of its directory.
/// Servers and their clients must write to it.
fn unwritable(volume: &Path) -> Option<Fact> {
    let opened = fs::File::options().read(true).write(true).open(volume);
    opened.err().map(|error| {
        let what = format!(
            "{}: cannot be opened for writing: {error}; \
             change its owner or permissions, or its mount",
            volume.display()
        );
        Fact::fail("store", what)
    })
}

/// A path that is lost with its container, or is not on a disk.
fn container(path: &Path) -> Option<Fact> {
    let name = probe::filesystem(fs::File::open(path).ok()?);
    let what = match name.as_str() {
        "overlayfs" | "overlay" => {
            "this is the container's own file system: slow, and lost with the container; \
             mount a directory of the host's NVMe disk"
        }
        "tmpfs" | "ramfs" => {
            "this is memory, not a disk: it is charged to the container and lost with it"
        }
        "nfs" | "smb" | "9p" | "fuse" | "ceph" | "lustre" => {
            "this may be remote, where locks do not hold: use a local disk"
        }
        _ => return None,
    };
    Some(Fact::warn(
        "path",
        format!("{} ({name}): {what}", path.display()),
    ))
}

/// The directory of a store that does not exist yet, if no disk is mounted there.
fn no_disk(directory: &Path) -> Option<Fact> {
    let mount = unmounted(directory)?;
    let what = format!(
        "no disk is mounted at {}: it is on the file system of {mount}; if a disk should be there, \
         mount it first",
        directory.display()
    );
    Some(Fact::warn("path", what))
}

fn size(config: &Config, found: u64) -> Option<Fact> {
    let wanted = config.size?;
    (found / 4096 != wanted / 4096).then(|| {
        let what = format!(
            "the store has {} and keeps it; the configured `size` is {} \
             (larder create --grow enlarges a store)",
            ByteSize(found),
            ByteSize(wanted)
        );
        Fact::warn("size", what)
    })
}

/// The settings of a served store, which its owner determines.
fn settings(config: &Config, owners: Settings) -> Fact {
    let wanted = open_options(config).settings();
    if owners == wanted {
        return Fact::ok("settings", owners.to_string());
    }
    let what = format!(
        "those of the store's owner hold: {owners}; configured are: {wanted}. Give all servers \
         the same"
    );
    Fact::warn("settings", what)
}

/// The pages that servers found and did not read.
fn unread(report: &share::Report) -> Option<Fact> {
    let mut counts = report.departed.counts;
    for process in &report.processes {
        counts.add(&process.counts.unwrap_or_default());
    }
    let (slow, unmeasured) = (counts.slow, counts.unmeasured);
    (slow + unmeasured > 0).then(|| {
        let what = format!(
            "servers found {} pages and did not read them: computing {slow} of them was faster \
             (`prefill_rate`), and for {unmeasured} the time of a read was not known yet. If that \
             surprises, look at the disk: `larder stat` has its read latency",
            slow + unmeasured
        );
        Fact::warn("reads", what)
    })
}

/// Whether pages fit a store that is not in use.
fn closed_pages(volume: &Path, bytes: u64, page_bytes: Option<u64>) -> Option<Fact> {
    let volumes =
        Volumes::open_any(volume, &[], larder_store::volume::Access::ReadOnly, false).ok()?;
    let segment_blocks = volumes.superblock().segment_blocks;
    let mut stats = Stats::default();
    stats.segment_bytes = u64::from(segment_blocks) * BLOCK_BYTES as u64;
    stats.capacity_bytes = bytes;
    Some(pages(volume, &stats, page_bytes))
}

/// Whether pages fit the segments of a store.
fn pages(volume: &Path, stats: &Stats, page_bytes: Option<u64>) -> Fact {
    let segment = ByteSize(stats.segment_bytes);
    let Some(page_bytes) = page_bytes else {
        let what = format!(
            "the store's segments of {segment} take pages of at most {} bytes: name the size \
             of the server's pages with --page-bytes to have it checked",
            largest_page(stats.segment_bytes)
        );
        return Fact::ok("pages", what);
    };
    match misfit(volume, stats, page_bytes) {
        Some(misfit @ Misfit::Never { .. }) => Fact::fail("pages", misfit.to_string()),
        Some(misfit @ Misfit::Wasteful { .. }) => Fact::warn("pages", misfit.to_string()),
        None => {
            let page = ByteSize(page_bytes);
            let what = format!("pages of {page} fit the store's segments of {segment}");
            Fact::ok("pages", what)
        }
    }
}

/// Whether a store that does not exist yet can be created with its size.
fn room(config: &Config, directory: &Path, page_bytes: Option<u64>) -> Option<Fact> {
    let Some(size) = config.size.filter(|size| *size > 0) else {
        let what = "`size` is missing or 0, and there is no store yet: set its size";
        return Some(Fact::fail("size", what.to_owned()));
    };
    let options = match options(&volume_of(directory), config, page_bytes) {
        Ok(options) => options.with(|o| o.dry_run = true),
        Err(error) => return Some(Fact::fail("pages", error.to_string())),
    };
    match create(&volume_of(directory), &options) {
        Ok(made) => {
            let (size, segment) = (ByteSize(size), ByteSize(made.segment_bytes));
            let what = match page_bytes {
                Some(_) => format!("{size} fit; the store would have segments of {segment}"),
                None => format!("{size} fit; the server chooses the segments by its pages"),
            };
            Some(Fact::ok("size", what))
        }
        Err(
            error @ (StoreError::Usage(_)
            | StoreError::TooSmall { .. }
            | StoreError::NoSpace { .. }),
        ) => Some(Fact::fail("size", format!("`size`: {error}"))),
        // Other problems have their own line.
        Err(_) => None,
    }
}

/// Prints the facts about a configuration, for pages of this size (a text such as `16MiB`), and
/// those about the machine. `program` starts the command line. Returns the exit code.
///
/// # Errors
/// The size of a page cannot be read.
pub fn report(
    program: &cli::Program,
    page_bytes: Option<&str>,
    examine: impl FnOnce(Option<u64>) -> (Vec<Fact>, Option<PathBuf>),
) -> Result<u8, SizeError> {
    let page_bytes = page_bytes.map(str::parse::<ByteSize>).transpose()?;
    let (facts, look) = examine(page_bytes.map(|size| size.0));
    let failed = print(&facts);
    let Some(look) = look else {
        return Ok(u8::from(failed));
    };
    let machine = cli::run(program, ["doctor".into(), look.into_os_string()]);
    Ok(machine.max(u8::from(failed)))
}

/// Prints facts, one per line. Returns whether any of them is a failure.
fn print(facts: &[Fact]) -> bool {
    for Fact { level, name, what } in facts {
        println!("{level:<4}  {name:<14}  {what}");
    }
    facts.iter().any(|fact| fact.level == Level::Fail)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_engine::{CreateOptions, PageStore};

    use super::*;

    fn config(path: &Path, more: &str) -> String {
        format!(r#"{{"path":"{}"{more}}}"#, path.display())
    }

    fn examine(json: &str, page_bytes: Option<u64>) -> (Vec<Fact>, Option<PathBuf>) {
        super::examine(Config::parse(json), Vec::new(), page_bytes, true)
    }

    fn levels(json: &str, name: &str) -> Vec<Level> {
        let (facts, _) = examine(json, None);
        let about = facts.iter().filter(|fact| fact.name == name);
        about.map(|fact| fact.level).collect()
    }

    #[test]
    fn a_good_configuration_has_no_failures_and_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("not/yet");
        let json = config(&path, r#","size":"256MiB""#);
        let (facts, look) = examine(&json, None);
        assert!(
            facts.iter().all(|fact| fact.level != Level::Fail),
            "{facts:?}"
        );
        // The store is not there yet: its place is looked at.
        assert_eq!(look.as_deref(), Some(directory.path()));
        assert!(!path.exists());
    }

    #[test]
    fn a_new_store_on_the_file_system_of_the_root_is_a_warning() {
        let of = |path: &str| {
            let json = config(Path::new(path), r#","size":"256MiB""#);
            let (facts, _) = examine(&json, None);
            let found = facts.into_iter().find(|fact| fact.what.contains("no disk"));
            found.map(|fact| (fact.level, fact.what))
        };
        let (level, what) = of("/no-such-disk/larder").unwrap();
        assert_eq!(level, Level::Warn);
        assert!(what.contains("the file system of / ("), "{what}");
        assert_eq!(of("/proc/no-such-place/larder"), None);
    }

    #[test]
    fn each_mistake_is_a_separate_failure() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let bad = |json: &str, name| levels(json, name).contains(&Level::Fail);
        assert!(bad(&config(path, r#","sise":"1GiB""#), "config"));
        assert!(bad(&config(path, ""), "size"));
        assert!(bad(&config(path, r#","size":0"#), "size"));
        assert!(bad(&config(path, r#","size":"16MiB""#), "size"));
        assert!(bad(&config(path, r#","size":"8388607TiB""#), "size"));
        assert!(bad(&config(Path::new("~/larder"), ""), "config"));
        let file = path.join("file");
        fs::write(&file, b"text").unwrap();
        assert!(bad(&config(&file, r#","size":"16MiB""#), "path"));
        assert!(bad(
            &config(Path::new("/dev/no-such-disk"), r#","size":"16MiB""#),
            "path"
        ));
    }

    #[test]
    fn pages_that_do_not_fit_are_a_failure_with_the_command_that_fixes_it() {
        let directory = tempfile::tempdir().unwrap();
        let json = config(directory.path(), r#","size":"256MiB""#);
        let about = |page_bytes: u64, name: &str| -> (Level, String) {
            let (facts, _) = examine(&json, Some(page_bytes));
            let found = facts.iter().find(|fact| fact.name == name);
            found.map(|fact| (fact.level, fact.what.clone())).unwrap()
        };
        // A new store gets segments for the page, if its size allows any.
        assert_eq!(about(20 << 20, "size").0, Level::Ok);
        let (level, what) = about(200 << 20, "size");
        assert!(level == Level::Fail && what.contains("at least"), "{what}");
        let options = CreateOptions::new(256 << 20);
        create(&volume_of(directory.path()), &options).unwrap();
        assert_eq!(about(1 << 20, "pages").0, Level::Ok);
        assert_eq!(about(10 << 20, "pages").0, Level::Warn);
        let (level, what) = about(20 << 20, "pages");
        assert!(
            level == Level::Fail && what.contains("--page-bytes"),
            "{what}"
        );
        assert_eq!(levels(&json, "pages"), [Level::Ok]);
    }

    #[test]
    fn other_settings_than_the_owners_are_a_warning() {
        let directory = tempfile::tempdir().unwrap();
        let json = config(
            directory.path(),
            r#","size":"256MiB","lease":"20s","prewrite":false"#,
        );
        let owned = larder_handle::place::attach(&Config::parse(&json).unwrap(), None).unwrap();
        assert_eq!(levels(&json, "settings"), [Level::Ok]);
        let other = config(
            directory.path(),
            r#","size":"256MiB","lease":"40s","prewrite":false"#,
        );
        assert_eq!(levels(&other, "settings"), [Level::Warn]);
        owned.store.close().unwrap();
    }

    #[test]
    fn a_store_that_cannot_be_written_is_a_failure() {
        let directory = tempfile::tempdir().unwrap();
        // A directory cannot be opened for writing, not even by root.
        fs::create_dir(volume_of(directory.path())).unwrap();
        let json = config(directory.path(), r#","size":"256MiB""#);
        assert!(levels(&json, "store").contains(&Level::Fail));
    }

    #[test]
    fn a_relative_path_is_resolved_against_the_working_directory() {
        let json = config(Path::new("no-such-directory"), r#","size":"16MiB""#);
        let here = std::env::current_dir().unwrap();
        let (facts, look) = examine(&json, None);
        assert_eq!(look.as_ref(), Some(&here));
        let relative = facts.iter().find(|fact| fact.level == Level::Warn).unwrap();
        let what = &relative.what;
        assert!(what.contains(&here.display().to_string()), "{what}");
        assert_eq!(levels(&json, "size"), [Level::Fail]);
    }
}
