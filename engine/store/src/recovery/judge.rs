//! Compares the records of one key with each other and with the deletions. The [module](super)
//! states the rules.

use larder_base::planted;
use larder_disk::Disk;
use larder_format::{Serial, Structure};

use super::doubt::{Doubt, Outcome, Payloads, Settled};
use super::found::{Damage, Extra, Found};
use super::gather::Gathered;
use super::scan::{Fault, FaultReason, Spot};

/// The outcome of a page that a descriptor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The current page of its key.
    Live,
    /// The key was put again, or the page was copied elsewhere.
    Superseded,
    /// A crash interrupted its write, and an older record of the key is whole.
    Unfinished,
    /// Its key was deleted or evicted by a record of this version.
    Gone(Serial),
    /// Its namespace was cleared by a record of this version.
    Cleared(Serial),
    /// Its put failed.
    Void,
}

impl<E: Extra> Gathered<E> {
    /// Compares the records of each key. Returns the pages in the order of namespaces, keys and
    /// versions, and the fate of each.
    pub fn judge(&mut self, disk: &dyn Disk, spots: &[Spot]) -> (Vec<Found<E>>, Vec<Fate>) {
        let mut pages = std::mem::take(&mut self.pages);
        pages.retain(|page| !page.is_disbelieved);
        pages.sort_unstable_by_key(|page| (page.slot, page.key, page.birth, page.commit));
        let mut fates: Vec<Fate> = pages
            .iter()
            .map(|page| self.fate_by_deletions(page))
            .collect();
        let mut doubts = Vec::new();
        let mut first = 0;
        for records in pages.chunk_by(|a, b| (a.slot, a.key) == (b.slot, b.key)) {
            let here = first..first + records.len();
            first = here.end;
            if records.len() > 1 {
                doubts.extend(self.judge_key(&pages, here, &mut fates));
            }
        }
        let payloads = Payloads {
            disk,
            spots,
            namespaces: &self.namespaces,
            pages: &pages,
        };
        for (doubt, outcome) in doubts.iter().zip(payloads.settle(&doubts)) {
            self.keep_unread(&pages, spots, &outcome);
            let (counts, is_whole) = match outcome.settled {
                Some(Settled::Whole(at)) => (at, true),
                Some(Settled::Unread(at)) => (at, false),
                // All bytes are wrong. The newest stays: a get of it will be a miss.
                None => continue,
            };
            for &newer in doubt.candidates.iter().take_while(|at| **at != counts) {
                fates[newer] = Fate::Unfinished;
            }
            fates[counts] = Fate::Live;
            pages[counts].proven |= is_whole;
        }
        (pages, fates)
    }

    /// Keeps the segments of the records that do not count because their bytes cannot be read now.
    /// The next opening may find them whole, and then they count.
    fn keep_unread(&mut self, pages: &[Found<E>], spots: &[Spot], outcome: &Outcome) {
        for (page, error) in &outcome.unread {
            if matches!(outcome.settled, Some(Settled::Unread(counts)) if counts == *page) {
                continue;
            }
            let id = pages[*page].place.segment;
            let spot = &spots[id.0 as usize];
            if self.unread.insert(id) {
                let offset = spot.data(pages[*page].place.start, 1).offset;
                self.damage.push(Damage {
                    volume: spot.volume,
                    segment: Some(spot.number),
                    fault: Fault {
                        offset,
                        structure: Structure::DescriptorBlock,
                        reason: FaultReason::UnreadPage(*error),
                    },
                });
            }
        }
    }

    /// Keeps the newest of the records of one key that no deletion kills. Returns the doubt about
    /// it, if there is one.
    fn judge_key(
        &self,
        pages: &[Found<E>],
        records: std::ops::Range<usize>,
        fates: &mut [Fate],
    ) -> Option<Doubt> {
        let mut living: Vec<usize> = records.rev().collect();
        living.retain(|&at| fates[at] == Fate::Live);
        if planted!(LowerBirthWins) {
            living.reverse();
        }
        let (&newest, older) = living.split_first()?;
        for &at in older {
            fates[at] = Fate::Superseded;
        }
        if older.is_empty() || pages[newest].proven {
            return None;
        }
        let key = *self.keys.get(&(pages[newest].slot, pages[newest].key))?;
        let mut candidates = vec![newest];
        for &at in older {
            candidates.push(at);
            if pages[at].proven {
                break;
            }
        }
        Some(Doubt { key, candidates })
    }

    fn fate_by_deletions(&self, page: &Found<E>) -> Fate {
        let gone = self.gone.get(&(page.slot, page.key));
        if let Some(&birth) = gone.filter(|birth| page.birth < **birth) {
            return Fate::Gone(birth);
        }
        if self.void.contains(&(page.slot, page.key, page.birth)) {
            return Fate::Void;
        }
        let cleared = self.clears.get(&page.slot);
        match cleared.filter(|birth| page.birth < **birth) {
            Some(&birth) => Fate::Cleared(birth),
            None => Fate::Live,
        }
    }
}
