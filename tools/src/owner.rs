//! Parts of an owner's answer, for people.

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use larder_engine::{HolderState, LockHolder, Stats, StoreError};
use larder_format::{History, OpenState, Superblock};
use larder_store::beneath::BeneathReport;
use larder_store::quotas::{QuotaReport, QuotaUse};
use larder_store::share;
use larder_store::share::VolumeState;
use larder_store::volume::socket::socket_path;
use larder_store::volume::{Access, Volumes};

use crate::failure::Failure;
use crate::place::volume_at;
use crate::refusal::explained;
use crate::report::count;
use crate::size::{ByteSize, date, whole};

/// List prices of AWS S3 in us-east-1, in US dollars.
const PUT_USD: f64 = 5.0e-6;
const GB_MONTH_USD: f64 = 0.023;

/// Hours of a month.
const MONTH_HOURS: f64 = 730.0;

/// A process, for people; it may run in another pid namespace.
pub fn process(pid: Option<u32>) -> String {
    match pid {
        Some(pid) => format!("process {pid}"),
        None => "a process of another pid namespace".to_owned(),
    }
}

/// Longest time for a look at the volumes of a store that no process serves: they may hang.
const LOOK_PATIENCE: Duration = Duration::from_secs(2);

/// The failure to reach the owner of a store. If no process could own the store, for a volume that
/// is missing, cut or destroyed, that is the cause. Else the last processes that had it open are
/// named.
pub fn unserved(path: &Path, error: StoreError) -> Failure {
    let StoreError::NotServed { .. } = &error else {
        return error.into();
    };
    let (teller, told) = mpsc::channel();
    let of = path.to_owned();
    let look = move || {
        let opened = Volumes::open_any(&of, &[], Access::ReadOnly, false);
        // The asker may have given up.
        drop(teller.send(opened.map(|volumes| history(volumes.superblock()))));
    };
    let began = thread::Builder::new().spawn(look);
    let found = began
        .ok()
        .and_then(|_| told.recv_timeout(LOOK_PATIENCE).ok());
    match found {
        Some(Err(why)) => Failure::environment(format!(
            "{}: no process serves the store, and none can open it: {}",
            path.display(),
            explained(&why)
        )),
        Some(Ok(history)) => Failure::from(error).with_more(&history),
        None => error.into(),
    }
}

/// A displaced volume, for people.
pub fn displaced_line(volume: &share::DisplacedVolume) -> String {
    format!(
        "{}: {}; the owner serves the former file. Stop the owner and serve the store at the path, \
         or move the former file back",
        volume.path.display(),
        volume.reason
    )
}

/// A damaged volume, for people.
pub fn damaged_line(volume: &share::DamagedVolume) -> String {
    let (path, what) = (volume.path.display(), volume.damage.what());
    match volume.places {
        0 => format!("{path}: {what}"),
        places => format!("{path}: {}: {what}", count(places, "place")),
    }
}

/// The pages that the owner has dropped because of their bytes, for people; `None` without any.
pub fn damaged_pages_line(stats: &Stats) -> Option<String> {
    (stats.damaged > 0).then(|| {
        format!(
            "{} dropped since the owner opened the store: check the disk, and run `larder verify \
             --online`",
            count(stats.damaged, "damaged page")
        )
    })
}

/// Quotas that cannot be read, for people.
pub fn unread_quotas_line(fault: &str) -> String {
    format!(
        "the quotas cannot be read ({fault}): none is in force until `larder quota --clear` \
         removes them and they are set anew"
    )
}

/// A quota and its use, for people.
pub fn quota_line(of: &QuotaUse) -> String {
    let max = of.quota.max_bytes;
    format!(
        "{}: {} stored, at least {} kept, {}{} ({})",
        of.quota.group,
        ByteSize(of.stored_bytes),
        ByteSize(of.quota.min_bytes),
        max.map_or("no maximum".to_owned(), |max| format!(
            "at most {}",
            ByteSize(max)
        )),
        of.quota.max_age_s.map_or(String::new(), |age| format!(
            ", for {} after the put",
            whole(age)
        )),
        count(of.namespaces, "namespace"),
    )
}

/// That pages older than a limit stay in a store, for people.
pub fn lifetimes_line(quotas: &QuotaReport) -> Option<String> {
    (quotas.removes_old_pages == Some(false)).then(|| {
        "pages older than their limit are not served, and are removed once the kernel has stated \
         for ten minutes that a time service keeps the clock right"
            .to_owned()
    })
}

/// How a volume answers, for people.
pub fn answering_line(volume: &share::AnsweringVolume) -> String {
    let place = on_device(volume);
    let (state, oldest) = (volume.state.as_str(), volume.oldest_seconds);
    let times = match volume.p99_seconds {
        0.0 => "no read or write ended in the last 10 s".to_owned(),
        p99 => format!("99 % of the reads and writes of the last 10 s took less than {p99} s"),
    };
    let advice = match volume.state {
        VolumeState::Answering => "",
        VolumeState::Slow | VolumeState::Hung => {
            "; look for errors of the device in the kernel's log (dmesg), and for limits on its I/O"
        }
    };
    format!("{place}: {state}; oldest operation {oldest:.1} s, {times}{advice}")
}

/// A volume, and the device below it, for people.
pub fn on_device(volume: &share::AnsweringVolume) -> String {
    let path = volume.path.display();
    match volume.device.as_str() {
        "" => path.to_string(),
        device => format!("{path} on {device}"),
    }
}

/// The volume of a served store that hangs, if one does.
pub fn hung_volume(path: &Path) -> Option<share::AnsweringVolume> {
    let path = volume_at(path.to_owned());
    if !socket_path(&path).exists() {
        return None;
    }
    let volumes = share::report(&path).ok()?.answering_volumes.into_iter();
    { volumes }.find(|volume| volume.state == VolumeState::Hung)
}

/// The last client that ended in the middle of puts, for people.
pub fn ended_line(client: &share::EndedClient) -> String {
    let share::EndedClient {
        pid, name, pages, ..
    } = client;
    let name = name.as_deref().unwrap_or("of unknown name");
    let ended = (client.ended_unix_s >= 0.0).then_some(client.ended_unix_s as u64);
    format!(
        "{} ({name}) ended in the middle of puts at {} (killed, or a crash): {} not stored; the \
         store is well",
        process(*pid),
        date(ended.unwrap_or_default()),
        count(*pages, "page")
    )
}

/// The last process that had a store open which no process has open now, and the one before if
/// that was killed; for people.
pub fn history(superblock: &Superblock) -> String {
    let holder = LockHolder::from(&superblock.holder);
    let whose = match holder.state {
        HolderState::OutOfSight => " of another pid namespace or boot",
        HolderState::Running | HolderState::Exited => "",
    };
    let opened = |unix_s| match unix_s {
        0 => String::new(),
        unix_s => format!(", which opened it at {},", date(unix_s)),
    };
    let History {
        opened_unix_s,
        unclosed,
    } = superblock.history;
    let last = format!("process {}{whose}{}", holder.pid, opened(opened_unix_s));
    let before = unclosed.map(|before| {
        format!(
            "process {}{} was killed or crashed, and process {} took the store over",
            before.pid,
            opened(before.opened_unix_s),
            holder.pid
        )
    });
    let ended = match superblock.state {
        OpenState::Clean => format!("it was closed cleanly by {last}")
            .trim_end_matches(',')
            .to_owned(),
        OpenState::Open => {
            format!("{last} was killed or crashed, and did not close it; the next open recovers it")
        }
    };
    match before {
        Some(before) => format!("{ended}. Before that, {before}"),
        None => ended,
    }
}

/// A client that is stopped, for people.
pub fn stopped_line(client: &share::StoppedClient) -> String {
    let share::StoppedClient {
        pid,
        name,
        stopped_seconds,
        reads_in_flight,
        puts_in_flight,
        ..
    } = client;
    let name = name.as_deref().unwrap_or("of unknown name");
    format!(
        "{} ({name}) has not run for {stopped_seconds:.0} s, in the middle of {} and {}; let it go \
         on (kill -CONT), or end it",
        process(*pid),
        count(*reads_in_flight, "page read"),
        count(*puts_in_flight, "put"),
    )
}

/// The order in which pages are evicted, for people.
pub fn eviction_line(stats: &Stats) -> String {
    let changes = count(stats.eviction_switches, "change");
    format!("{}; {changes} of the order so far", stats.eviction)
}

/// How much the owner's writes give way to reads, for people.
pub fn pacing_line(stats: &Stats) -> String {
    let Stats {
        pacing,
        paced_writes,
        paced_bytes,
        paced_rate,
        read_slowdown,
        ..
    } = stats;
    let paced = format!(
        "{pacing}; {paced_writes} writes paced beside reads, {}",
        ByteSize(*paced_bytes)
    );
    match *paced_rate {
        0 => format!("{paced}; no reads now"),
        rate => format!(
            "{paced}; now at most {} a second, reads take {read_slowdown:.2} times as long",
            ByteSize(rate)
        ),
    }
}

/// The most that the budgets of an L4 cost in a month, all its levels together; `None` without a
/// bucket.
pub fn monthly(l4: &BeneathReport) -> Option<String> {
    if !l4.place.contains("s3://") {
        return None;
    }
    let of = |name: &str| l4.counts.get(name).map(|count| *count as f64);
    let (bytes, requests) = (of("budget_bytes_per_day")?, of("budget_requests_per_hour")?);
    // Publications and listings are the dearest.
    let requests = requests * PUT_USD * MONTH_HOURS;
    let day = bytes / 1e9 * GB_MONTH_USD;
    Some(format!(
        "at most ${requests:.0} a month for requests, and ${day:.0} for each day that objects are \
         kept (its budgets, at list prices of AWS S3)"
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn report(place: &str) -> BeneathReport {
        let budgets = [
            ("budget_bytes_per_day", 1 << 40),
            ("budget_requests_per_hour", 100_000),
        ];
        BeneathReport {
            place: place.to_owned(),
            state: String::new(),
            works: true,
            counts: budgets.map(|(name, most)| (name.to_owned(), most)).into(),
        }
    }

    #[test]
    fn the_budgets_of_a_bucket_have_a_price() {
        let said = monthly(&report("s3://kvpages")).unwrap();
        assert!(
            said.contains("$365 a month") && said.contains("$25 for each day"),
            "{said}"
        );
        assert_eq!(monthly(&report("file:///mnt/pages")), None);
    }
}
