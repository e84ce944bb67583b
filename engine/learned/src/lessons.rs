//! The tables as bytes: what a store has learned until its next open. What it knows of its pages is
//! in [`notes`](super::notes).

use serde::{Deserialize, Serialize};

use super::class::{Classes, TRAITS};
use super::hazard::Hazards;
use super::recency::Epoch;

/// The meaning of the traits, of the steps of age and of the moment.
const VERSION: u32 = 2;

/// Longest tables.
const LENGTH_MAX: usize = 1 << 20;

/// When the tables were written, and what the store was like then.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Moment {
    /// In ticks.
    pub now: u32,
    pub epoch: Epoch,
    /// The store was full.
    pub is_ripe: bool,
    /// Mean index of the leaves evicted lately.
    pub cold: f32,
}

#[derive(Serialize, Deserialize)]
struct Tables {
    version: u32,
    moment: Moment,
    classes: Vec<[u8; TRAITS]>,
    uses: Vec<Vec<f32>>,
    seconds: Vec<Vec<f32>>,
}

pub(super) fn write(classes: &Classes, hazards: &Hazards, moment: Moment) -> Vec<u8> {
    let (uses, seconds) = hazards.tables();
    let tables = Tables {
        version: VERSION,
        moment,
        classes: classes.all().iter().map(|traits| traits.values()).collect(),
        uses,
        seconds,
    };
    postcard::to_stdvec(&tables).unwrap_or_default()
}

/// `None` for anything but the tables of this version.
pub(super) fn read(bytes: &[u8]) -> Option<(Classes, Hazards, Moment)> {
    if bytes.is_empty() || bytes.len() > LENGTH_MAX {
        return None;
    }
    let tables: Option<Tables> = postcard::from_bytes(bytes).ok();
    let read = tables
        .filter(|tables| tables.version == VERSION && tables.moment.cold.is_finite())
        .and_then(|tables| {
            let classes = Classes::with(&tables.classes)?;
            let hazards = Hazards::with(&classes, tables.uses, tables.seconds)?;
            Some((classes, hazards, tables.moment))
        });
    if read.is_none() {
        tracing::info!("the lessons of eviction are those of another release; it learns anew");
    }
    read
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TICKS;
    use crate::class::VALUES;

    const MOMENT: Moment = Moment {
        now: 70_000,
        epoch: 300,
        is_ripe: true,
        cold: 0.01,
    };

    fn learned() -> (Classes, Hazards) {
        let mut traits = [[VALUES as u8 - 1; TRAITS], [0; TRAITS], [1; TRAITS]];
        traits[2][3] = 2;
        let classes = Classes::with(&traits).expect("these are traits");
        let mut hazards = Hazards::default();
        hazards.expect(3);
        for _ in 0..500 {
            hazards.add_time(1, 0, 100 * TICKS);
            hazards.add_use(1, 10 * TICKS);
        }
        hazards.refresh(&classes);
        while hazards.index_some() {}
        (classes, hazards)
    }

    #[test]
    fn tables_that_were_read_back_rank_as_before() {
        let (classes, hazards) = learned();
        let bytes = write(&classes, &hazards, MOMENT);
        let (again, ranks, moment) = read(&bytes).expect("they are of this version");
        assert_eq!(moment, MOMENT);
        assert_eq!(again.all(), classes.all());
        for age in [0, 9, 50, 200] {
            let (before, now) = (hazards.index(1, age * TICKS), ranks.index(1, age * TICKS));
            assert!((before - now).abs() < 0.2 * before, "{age}: {before} {now}");
        }
        assert!(ranks.index(1, 9 * TICKS) > ranks.index(2, 9 * TICKS));
    }

    #[test]
    fn bytes_that_are_no_tables_are_ignored_wherever_they_are_wrong() {
        let (classes, hazards) = learned();
        let bytes = write(&classes, &hazards, MOMENT);
        assert!(read(&[]).is_none());
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_none());
        }
        for at in 0..bytes.len() {
            for wrong in [0xff, 0x7f, bytes[at] ^ 1] {
                let mut bytes = bytes.clone();
                bytes[at] = wrong;
                // Another number in a table is possible: it is a number all the same.
                if let Some((classes, hazards, moment)) = read(&bytes) {
                    assert!(moment.cold.is_finite());
                    let index = hazards.index(classes.all().len() as u16 - 1, 0);
                    assert!(index.is_finite());
                }
            }
        }
    }
}
