//! Sizes as people write and read them: `64GiB` in, `64 GiB` out, bytes in between. Durations:
//! `30s`, `500ms`. And dates.
//!
//! Owns the one grammar of sizes on the command line: digits, optionally a fraction, optionally
//! `B`, `KiB`, `MiB`, `GiB` or `TiB` in any case. No unit means bytes. Invariant: arithmetic is
//! exact in integers; a fraction of a byte is dropped. Durations are whole numbers of `ms`, `s`,
//! `m`, `h` or `d`, at most 100 years. No unit means seconds.
//!
//! Defends against ambiguous units: `GB` and `G` are refused, not guessed. Does not know the use of
//! a size, nor its limits.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Units, smallest first, and how many bytes each stands for.
const UNITS: [(&str, u64); 5] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Most digits of a fraction; more could not change a whole number of bytes.
const FRACTION_DIGITS_MAX: usize = 15;

/// Longest duration: 100 years. A deadline so far ahead fits an `Instant`.
pub const DURATION_MAX: Duration = Duration::from_secs(36_500 * 24 * 60 * 60);

/// Reads a number above 0 for the command line.
///
/// # Errors
/// A sentence for people.
pub fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("a number above 0 is needed".to_owned()),
    }
}

/// A number of bytes, written `64GiB` on the command line and printed `64 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A time as people read it: `200 µs`, `1.5 ms`, `23 s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match self.0.as_secs_f64() {
            seconds if seconds >= 1.0 => (seconds, "s"),
            seconds if seconds >= 1e-3 => (seconds * 1e3, "ms"),
            seconds => (seconds * 1e6, "µs"),
        };
        let shown = format!("{value:.1}");
        write!(f, "{} {unit}", shown.trim_end_matches(".0"))
    }
}

/// Text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// A number is missing.
    #[error(
        "`{0}` is not a size; write bytes (4096) or a number and a unit (64KiB, 16MiB, 1.5GiB, \
         2TiB)"
    )]
    Number(String),
    /// A number, but a unit that is unknown or ambiguous.
    #[error("`{0}` is not a unit; use B, KiB, MiB, GiB or TiB (powers of 1024)")]
    Unit(String),
    /// Zero, where it would have no meaning.
    #[error("`{0}` is nothing: give at least one byte")]
    Zero(String),
    /// More than fits 64 bits.
    #[error("`{0}` is more than 2^64 bytes")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let number_end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(number_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let malformed = || SizeError::Number(text.to_owned());
        let digits =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(fraction) || fraction.len() > FRACTION_DIGITS_MAX {
            return Err(malformed());
        }
        let unit_bytes = unit_bytes(unit.trim())?;
        let whole: u128 = whole
            .parse()
            .map_err(|_| SizeError::TooLarge(text.to_owned()))?;
        let scale = 10_u128.pow(u32::try_from(fraction.len()).map_err(|_| malformed())?);
        let fraction: u128 = fraction.parse().map_err(|_| malformed())?;
        let bytes = whole
            .checked_mul(unit_bytes)
            .and_then(|bytes| bytes.checked_add(fraction * unit_bytes / scale));
        let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok());
        bytes
            .map(ByteSize)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

fn unit_bytes(unit: &str) -> Result<u128, SizeError> {
    if unit.is_empty() {
        return Ok(1);
    }
    let known = UNITS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit));
    known
        .map(|(_, bytes)| u128::from(*bytes))
        .ok_or_else(|| SizeError::Unit(unit.to_owned()))
}

impl fmt::Display for ByteSize {
    /// The largest unit that leaves at least 1; one decimal unless the number is whole.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = UNITS.iter().rev().find(|(_, bytes)| self.0 >= *bytes);
        let (name, unit) = fits.copied().unwrap_or(("B", 1));
        if self.0.is_multiple_of(unit) {
            return write!(f, "{} {name}", self.0 / unit);
        }
        let number = self.0 as f64 / unit as f64;
        write!(f, "{number:.1} {name}")
    }
}

/// Reads a size of at least one byte for the command line.
///
/// # Errors
/// The text is no size, or zero.
pub fn positive(text: &str) -> Result<ByteSize, SizeError> {
    match text.parse()? {
        ByteSize(0) => Err(SizeError::Zero(text.to_owned())),
        size => Ok(size),
    }
}

/// Reads a duration for the command line.
///
/// # Errors
/// A sentence about the form of a duration.
pub fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let malformed = || {
        format!(
            "`{text}` is not a duration; write seconds (30) or a whole number and a unit (500ms, \
             30s, 2m, 6h, 7d)"
        )
    };
    if number.is_empty() {
        return Err(malformed());
    }
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60 * 1000,
        "h" => 60 * 60 * 1000,
        "d" => 24 * 60 * 60 * 1000,
        _ => return Err(malformed()),
    };
    // Digits that are no `u64` are a larger number.
    let milliseconds = number.parse::<u64>().ok();
    let milliseconds = milliseconds.and_then(|number| number.checked_mul(unit_ms));
    milliseconds
        .map(Duration::from_millis)
        .filter(|duration| *duration <= DURATION_MAX)
        .ok_or_else(|| format!("`{text}` is more than 100 years (36500d); write a shorter time"))
}

/// A number of seconds in the largest unit of which it is a multiple.
pub fn whole(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "min")];
    let fits = |(unit, _): &(u64, _)| seconds > 0 && seconds.is_multiple_of(*unit);
    let (unit, name) = units.into_iter().find(fits).unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

/// A moment in the usual notation: `2026-03-01 17:05 UTC`.
pub fn date(unix_s: u64) -> String {
    let (days, seconds) = (unix_s / 86_400, unix_s % 86_400);
    // Years that begin in March end with the leap day, so that months follow one rule; 400 of them
    // are 146,097 days.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute) = (seconds / 3600, seconds % 3600 / 60);
    format!("{year}-{month:02}-{day_of_month:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn times_have_the_unit_that_people_read() {
        let times = [
            0,
            860,
            200_000,
            1_500_000,
            999_900_000,
            4_043_309_100,
            23_000_000_000,
        ];
        let shown = times.map(|ns| Time(Duration::from_nanos(ns)).to_string());
        let read = [
            "0 µs", "0.9 µs", "200 µs", "1.5 ms", "999.9 ms", "4 s", "23 s",
        ];
        assert_eq!(shown, read);
    }

    #[test]
    fn whole_times_keep_their_value() {
        let shown = [0, 59, 5400, 7200, 2_592_000].map(whole);
        assert_eq!(shown, ["0 s", "59 s", "90 min", "2 h", "30 d"]);
    }

    #[test]
    fn sizes_are_read_with_and_without_units() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("64KiB", 64 << 10),
            ("16 MiB", 16 << 20),
            ("64gib", 64 << 30),
            ("1.5GiB", 3 << 29),
            ("0.5KiB", 512),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn a_fraction_of_a_byte_is_dropped() {
        assert_eq!("0.1KiB".parse(), Ok(ByteSize(102)));
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_the_reason() {
        for text in [
            "",
            "GiB",
            "-1",
            "1.",
            ".5GiB",
            "1.2.3GiB",
            "one",
            "1.0000000000000000GiB",
        ] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(SizeError::Number(text.to_owned())),
                "{text}"
            );
        }
        for (text, unit) in [("4GB", "GB"), ("4G", "G"), ("4 apples", "apples")] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(SizeError::Unit(unit.to_owned()))
            );
        }
        for text in [
            "18446744073709551616",
            "16777216TiB",
            "99999999999999999999999999999999999999999",
        ] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(SizeError::TooLarge(text.to_owned()))
            );
        }
    }

    #[test]
    fn sizes_are_printed_in_the_largest_unit_that_leaves_at_least_one() {
        let cases = [
            (0, "0 B"),
            (1, "1 B"),
            (4096, "4 KiB"),
            (3 << 29, "1.5 GiB"),
            (64 << 30, "64 GiB"),
            (1025, "1.0 KiB"),
            (u64::MAX, "16777216.0 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }

    #[test]
    fn durations_are_whole_numbers_with_a_unit() {
        let read = ["0", "30", "30s", "500ms", "2m", "6h", "7d"];
        let read = read.map(|text| duration(text).unwrap().as_millis());
        let days = 7 * 86_400_000;
        assert_eq!(read, [0, 30_000, 30_000, 500, 120_000, 21_600_000, days]);
        for text in ["", "s", "1.5s", "-1s", "3w"] {
            assert!(
                duration(text)
                    .unwrap_err()
                    .starts_with(&format!("`{text}` is not a duration")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_duration_has_an_upper_bound() {
        assert_eq!(duration("36500d"), Ok(DURATION_MAX));
        for text in [
            "36501d",
            "3153600001s",
            "3153600000001ms",
            "18446744073709551615",
            "18446744073709551616m",
        ] {
            let refused = duration(text).unwrap_err();
            assert!(
                refused.starts_with(&format!("`{text}` is more than 100 years")),
                "{refused}"
            );
        }
    }

    #[test]
    fn moments_are_written_as_dates_leap_days_included() {
        let cases = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59 UTC"),
            (1_709_251_200, "2024-03-01 00:00 UTC"),
            (4_102_444_800, "2100-01-01 00:00 UTC"),
        ];
        for (unix_s, written) in cases {
            assert_eq!(date(unix_s), written);
        }
    }
}
