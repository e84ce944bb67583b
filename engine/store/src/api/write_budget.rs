//! How much a store may write, as people state it: `3TB/day`, `0.5DWPD`, `off`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How much the store may write: pages of puts, copies of reclaim, descriptors and headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WriteBudget {
    /// As much as puts ask for.
    #[default]
    Off,
    /// So many bytes a day.
    Bytes(u64),
    /// So many thousandths of the size of all volumes a day.
    Drives(u32),
}

/// Units in the order in which they are tried to show a budget, and their bytes. Makers of drives
/// state endurance in powers of 1000.
const UNITS: [(&str, u64); 6] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
];

const DAY: &str = "/day";
const DRIVES: &str = "DWPD";

impl WriteBudget {
    /// Bytes a day for volumes of this size together; `None` without a limit.
    #[must_use]
    pub fn bytes_a_day(self, capacity: u64) -> Option<u64> {
        match self {
            WriteBudget::Off => None,
            WriteBudget::Bytes(bytes) => Some(bytes),
            WriteBudget::Drives(share) => Some(capacity / 1000 * u64::from(share)),
        }
    }
}

/// A positive number in thousandths. More digits behind the point are refused.
fn thousandths(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(part) || part.len() > 3 {
        return None;
    }
    let part: u64 = format!("{part:0<3}").parse().ok()?;
    let number = whole.parse::<u64>().ok()?.checked_mul(1000)? + part;
    (number > 0).then_some(number)
}

fn without_suffix<'a>(text: &'a str, suffix: &str) -> Option<&'a str> {
    let (head, tail) = text.split_at_checked(text.len().checked_sub(suffix.len())?)?;
    tail.eq_ignore_ascii_case(suffix).then(|| head.trim_end())
}

impl FromStr for WriteBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<WriteBudget, String> {
        let known = || {
            let text = text.trim();
            if text.eq_ignore_ascii_case("off") {
                return Some(WriteBudget::Off);
            }
            if let Some(number) = without_suffix(text, DRIVES) {
                let share = u32::try_from(thousandths(number)?).ok()?;
                return Some(WriteBudget::Drives(share));
            }
            let size = without_suffix(text, DAY)?;
            let (number, unit) = UNITS
                .iter()
                .find_map(|(name, bytes)| Some((without_suffix(size, name)?, *bytes)))?;
            let bytes = u128::from(thousandths(number)?) * u128::from(unit) / 1000;
            let bytes = u64::try_from(bytes).ok()?;
            Some(WriteBudget::Bytes(bytes))
        };
        known().ok_or_else(|| {
            format!(
                "`{text}` is not a budget of writes: write bytes a day (3TB/day, 500GiB/day), \
                 drive writes a day (0.5DWPD, of the store's size), or off"
            )
        })
    }
}

/// As it is read.
impl fmt::Display for WriteBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |f: &mut fmt::Formatter<'_>, thousandths: u64| {
            let number = format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
            f.write_str(number.trim_end_matches('0').trim_end_matches('.'))
        };
        match *self {
            WriteBudget::Off => f.write_str("off"),
            WriteBudget::Bytes(bytes) => {
                let exact = UNITS.iter().find(|(_, unit)| {
                    bytes >= *unit && (u128::from(bytes) * 1000).is_multiple_of((*unit).into())
                });
                let (name, unit) = *exact.unwrap_or(&UNITS[5]);
                let thousandths = u128::from(bytes) * 1000 / u128::from(unit);
                number(f, u64::try_from(thousandths).unwrap_or(u64::MAX))?;
                write!(f, "{name}{DAY}")
            }
            WriteBudget::Drives(share) => {
                number(f, share.into())?;
                f.write_str(DRIVES)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_budget_is_read_as_it_is_shown() {
        for (text, budget, shown) in [
            ("off", WriteBudget::Off, "off"),
            ("3TB/day", WriteBudget::Bytes(3_000_000_000_000), "3TB/day"),
            (
                " 1.5 gb/Day",
                WriteBudget::Bytes(1_500_000_000),
                "1.5GB/day",
            ),
            ("500GiB/day", WriteBudget::Bytes(500 << 30), "500GiB/day"),
            ("0.5DWPD", WriteBudget::Drives(500), "0.5DWPD"),
            ("2 dwpd", WriteBudget::Drives(2000), "2DWPD"),
        ] {
            assert_eq!(text.parse(), Ok(budget), "{text}");
            assert_eq!(budget.to_string(), shown);
            assert_eq!(shown.parse(), Ok(budget));
        }
        let unknown = [
            "",
            "3",
            "3TB",
            "0/day",
            "0TB/day",
            "1.0001TB/day",
            "-1DWPD",
            "xTB/day",
        ];
        for text in unknown
            .into_iter()
            .chain(["99999999999TB/day", "é/day", "1e3DWPD"])
        {
            let error = text.parse::<WriteBudget>().unwrap_err();
            assert!(error.contains(text) && error.contains("3TB/day"), "{error}");
        }
    }

    #[test]
    fn drive_writes_are_of_the_size_of_the_volumes() {
        assert_eq!(WriteBudget::Off.bytes_a_day(1 << 40), None);
        assert_eq!(WriteBudget::Bytes(7).bytes_a_day(1 << 40), Some(7));
        let half = WriteBudget::Drives(500).bytes_a_day(4_000_000);
        assert_eq!(half, Some(2_000_000));
    }
}
