//! Runs on their way between a remote and the memory of this process.

/// Most bytes of runs on their way, unless it is a single one.
const BYTES_MAX: u64 = 512 << 20;

/// A run on its way.
#[derive(Clone, Copy, Debug)]
pub struct Flight {
    /// Its bytes.
    pub bytes: u64,
    /// Its requests at once.
    pub requests: usize,
}

/// The requests for runs on their way, and the bytes of them in memory. Both have a bound.
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

    /// Most such runs at once.
    #[must_use]
    pub fn most_of(&self, flight: Flight) -> usize {
        let fit = usize::try_from(BYTES_MAX / flight.bytes.max(1)).unwrap_or(usize::MAX);
        fit.min(self.most / flight.requests.max(1)).max(1)
    }

    /// Whether a run may begin now.
    #[must_use]
    pub fn has_room(&self, flight: Flight) -> bool {
        let is_connected = self.requests == 0 || self.requests + flight.requests <= self.most;
        is_connected && (self.bytes == 0 || self.bytes + flight.bytes <= BYTES_MAX)
    }

    /// Runs whose bytes are on their way or in memory.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// A run begins its way.
    pub fn begin(&mut self, flight: Flight) {
        self.requests += flight.requests;
        self.runs += 1;
        self.bytes += flight.bytes;
    }

    /// Its requests are over. Its bytes are in memory.
    pub fn answered(&mut self, flight: Flight) {
        self.requests -= flight.requests;
    }

    /// Its bytes are not in memory any more.
    pub fn end(&mut self, flight: Flight) {
        self.runs -= 1;
        self.bytes -= flight.bytes;
    }
}
