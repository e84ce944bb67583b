//! Whether a store is worth its disk, in one sentence.

use serde::Serialize;

/// Gain of twice the size, in points, from which a store is too small.
const SMALL_POINTS: f64 = 5.0;

/// Part of the pages found below which a store is of little use.
const HITS_MIN: f64 = 0.02;

/// The facts of a verdict, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// Part of what is asked for that the store has, and that one of twice the size would have.
    pub hit_rate: Option<f64>,
    /// See `hit_rate`.
    pub double_hit_rate: Option<f64>,
    /// Milliseconds to read 1,000 tokens from the disk.
    pub read_ms: Option<f64>,
    /// Milliseconds to compute them.
    pub prefill_ms: Option<f64>,
    /// Bytes that the disk is to write, for each byte that it can write in the same time.
    pub write_share: Option<f64>,
    /// Seconds of prefill saved in a day, after the time of the reads.
    pub saved_seconds_per_day: Option<f64>,
}

/// A verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// The store saves time.
    WorthIt,
    /// Twice the size has many more hits.
    TooSmall,
    /// Reading takes longer than computing.
    PrefillFaster,
    /// The disk cannot take the writes.
    WritesTooSlow,
    /// Few pages are asked for again.
    FewHits,
    /// Without requests there are no hits to judge by.
    Unknown,
}

/// A verdict with its reason.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// See [`Judgement`].
    pub verdict: Judgement,
    /// The sentence.
    pub verdict_reason: String,
}

impl Facts {
    /// The verdict on these facts.
    pub fn verdict(&self) -> Verdict {
        let (verdict, verdict_reason) = self.judged();
        Verdict {
            verdict,
            verdict_reason,
        }
    }

    fn judged(&self) -> (Judgement, String) {
        // The times of requests say more than those of a usual prompt.
        let is_slower = self.saved_seconds_per_day.map(|saved| saved <= 0.0);
        if let (Some(read), Some(prefill)) = (self.read_ms, self.prefill_ms)
            && is_slower.unwrap_or(read >= prefill)
        {
            let sentence = format!(
                "Prefill is faster than this disk: 1,000 tokens take {read:.1} ms to read and \
                 {prefill:.1} ms to compute."
            );
            return (Judgement::PrefillFaster, sentence);
        }
        if let Some(share) = self.write_share.filter(|share| *share > 1.0) {
            let sentence = format!(
                "Too slow: the pages to be stored are {share:.1} times what this disk can write; \
                 use more drives or servers, or store fewer pages (write_through_selective)."
            );
            return (Judgement::WritesTooSlow, sentence);
        }
        let speeds = match (self.read_ms, self.prefill_ms) {
            (Some(read), Some(prefill)) => {
                format!("; 1,000 tokens take {read:.1} ms to read, {prefill:.1} ms to compute")
            }
            _ => String::new(),
        };
        let Some(hit_rate) = self.hit_rate else {
            let sentence = format!(
                "Hits are not known: give a trace or a running store to learn whether it is worth \
                 it{speeds}."
            );
            return (Judgement::Unknown, sentence);
        };
        let percent = hit_rate * 100.0;
        let gain = self
            .double_hit_rate
            .map(|double| (double - hit_rate) * 100.0);
        if let Some(gain) = gain.filter(|gain| *gain >= SMALL_POINTS) {
            let sentence = format!(
                "Too small: it finds {percent:.1} % of the pages, and twice the size {gain:.1} \
                 points more."
            );
            return (Judgement::TooSmall, sentence);
        }
        if hit_rate < HITS_MIN {
            let sentence = format!(
                "Of little use: it finds {percent:.1} % of the pages, because few are asked for \
                 again."
            );
            return (Judgement::FewHits, sentence);
        }
        let saved = self.saved_seconds_per_day.map(|seconds| {
            format!(
                ", which saves {:.1} hours of prefill a day",
                seconds / 3600.0
            )
        });
        let saved = saved.unwrap_or_default();
        let sentence = format!("Worth it: it finds {percent:.1} % of the pages{saved}{speeds}.");
        (Judgement::WorthIt, sentence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_names_the_first_reason_against_the_store() {
        let good = Facts {
            hit_rate: Some(0.4),
            double_hit_rate: Some(0.42),
            read_ms: Some(20.0),
            prefill_ms: Some(60.0),
            write_share: Some(0.5),
            saved_seconds_per_day: Some(7200.0),
        };
        let of = |facts: Facts| facts.verdict();
        let verdict = of(good);
        assert_eq!(verdict.verdict, Judgement::WorthIt);
        let reason = &verdict.verdict_reason;
        assert!(
            reason.contains("40.0 %") && reason.contains("2.0 hours"),
            "{reason}"
        );
        let slow = Facts {
            read_ms: Some(60.0),
            saved_seconds_per_day: None,
            ..good
        };
        assert_eq!(of(slow).verdict, Judgement::PrefillFaster);
        let slower = Facts {
            saved_seconds_per_day: Some(-1.0),
            ..good
        };
        assert_eq!(of(slower).verdict, Judgement::PrefillFaster);
        let writes = Facts {
            write_share: Some(1.5),
            ..good
        };
        assert_eq!(of(writes).verdict, Judgement::WritesTooSlow);
        let small = Facts {
            double_hit_rate: Some(0.5),
            ..good
        };
        assert_eq!(of(small).verdict, Judgement::TooSmall);
        let few = Facts {
            hit_rate: Some(0.01),
            double_hit_rate: Some(0.01),
            ..good
        };
        assert_eq!(of(few).verdict, Judgement::FewHits);
        let none = Facts {
            hit_rate: None,
            ..good
        };
        assert_eq!(of(none).verdict, Judgement::Unknown);
    }
}
