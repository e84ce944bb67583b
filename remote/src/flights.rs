//! Runs on their way between a remote and the memory of this process.

/// Most bytes of runs on their way, unless it is a single one.
const BYTES_MAX: u64 = 512 << 20;

/// The number of runs on their way, and the bytes of them in memory. Both have a bound.
#[derive(Clone, Copy, Debug)]
pub struct Flights {
    most: usize,
    requests: usize,
    runs: usize,
    bytes: u64,
}

impl Flights {
    /// At most so many requests at once.
    #[must_use]
    pub fn new(most: usize) -> Flights {
        Flights {
            most: most.max(1),
            requests: 0,
            runs: 0,
            bytes: 0,
        }
    }

    /// Most runs of so many bytes at once.
    #[must_use]
    pub fn most_of(&self, bytes: u64) -> usize {
        let fit = usize::try_from(BYTES_MAX / bytes.max(1)).unwrap_or(usize::MAX);
        self.most.min(fit.max(1))
    }

    /// Whether a run of so many bytes may begin now.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        let fits = self.bytes == 0 || self.bytes + bytes <= BYTES_MAX;
        self.requests < self.most && fits
    }

    /// Runs whose bytes are on their way or in memory.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// A run begins its way.
    pub fn begin(&mut self, bytes: u64) {
        self.requests += 1;
        self.runs += 1;
        self.bytes += bytes;
    }

    /// Its request is over. Its bytes are in memory.
    pub fn answered(&mut self) {
        self.requests -= 1;
    }

    /// Its bytes are not in memory any more.
    pub fn end(&mut self, bytes: u64) {
        self.runs -= 1;
        self.bytes -= bytes;
    }
}
