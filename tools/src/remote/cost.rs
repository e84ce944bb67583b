//! The cost of an L4 in a bucket.

use larder_engine::beneath::BeneathReport;

/// List prices of AWS S3 in us-east-1, in US dollars.
const PUT_USD: f64 = 5.0e-6;
const HEAD_USD: f64 = 0.4e-6;
const GB_MONTH_USD: f64 = 0.023;

/// Hours of a month.
const MONTH_HOURS: f64 = 730.0;

/// The most that the budgets of an owner cost in a month, those of all its levels; `None` without a
/// bucket.
#[expect(clippy::cast_precision_loss, reason = "an estimate for people")]
pub fn monthly(l4: &BeneathReport) -> Option<String> {
    if !l4.place.contains("s3://") {
        return None;
    }
    let of = |name: &str| l4.counts.get(name).map(|count| *count as f64);
    let (bytes, requests) = (of("budget_bytes_per_day")?, of("budget_requests_per_hour")?);
    // A publication looks for the object, and creates it.
    let requests = requests / 2.0 * (HEAD_USD + PUT_USD) * MONTH_HOURS;
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
            said.contains("$197 a month") && said.contains("$25 for each day"),
            "{said}"
        );
        assert_eq!(monthly(&report("file:///mnt/pages")), None);
    }
}
