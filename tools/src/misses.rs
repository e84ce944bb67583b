//! The reasons of misses, each with its counter.

use larder_engine::Misses;

/// Why a get did not return a page.
pub struct Reason {
    /// Its name in documents and metrics.
    pub label: &'static str,
    count: fn(&Misses) -> u64,
}

impl Reason {
    /// The misses for this reason.
    pub fn of(&self, misses: &Misses) -> u64 {
        (self.count)(misses)
    }

    /// Its name for people.
    pub fn name(&self) -> String {
        self.label.replace('_', " ")
    }
}

macro_rules! reasons {
    ($($reason:ident),*) => {
        [$(Reason { label: stringify!($reason), count: |misses| misses.$reason },)*]
    };
}

/// All reasons.
pub const REASONS: [Reason; 9] = reasons![
    absent,
    damaged,
    unfinished,
    read_error,
    deadline,
    hung,
    stale,
    wrong_shape,
    closed
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn each_reason_of_a_miss_is_in_the_list_once() {
        let mut document = serde_json::to_value(Misses::default()).unwrap();
        for (value, count) in (1..).zip(document.as_object_mut().unwrap().values_mut()) {
            *count = serde_json::Value::from(1_u64 << value);
        }
        let misses: Misses = serde_json::from_value(document.clone()).unwrap();
        assert_eq!(document.as_object().unwrap().len(), REASONS.len());
        for reason in &REASONS {
            assert_eq!(
                document[reason.label],
                reason.of(&misses),
                "{}",
                reason.label
            );
        }
    }
}
