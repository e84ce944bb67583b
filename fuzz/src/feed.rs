//! A fuzzer's input read as numbers, in order. Past its end every number is zero. So an input can
//! be truncated at any place without a change of the numbers before.

/// See the module.
#[derive(Debug)]
pub struct Feed<'a> {
    rest: &'a [u8],
}

impl<'a> Feed<'a> {
    /// Reads from these bytes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Feed<'a> {
        Feed { rest: bytes }
    }

    /// Whether everything has been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.word::<1>() as u8
    }

    /// The next two bytes.
    pub fn short(&mut self) -> u16 {
        self.word::<2>() as u16
    }

    /// The next `N` bytes, at most 8, as a number.
    pub fn word<const N: usize>(&mut self) -> u64 {
        let mut word = [0; 8];
        let taken = self.bytes(N);
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    /// The next bytes, as many as are left of `count`.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(count.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    /// A number in `0..bound`, or 0 if there is none.
    pub fn below(&mut self, bound: usize) -> usize {
        let word = if bound <= 256 {
            usize::from(self.byte())
        } else {
            usize::from(self.short())
        };
        word.checked_rem(bound).unwrap_or(0)
    }

    /// An element, or `None` if there are none.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let at = self.below(of.len());
        of.get(at).copied()
    }

    /// A number that may cause trouble: small, at a limit, or any.
    pub fn awkward(&mut self) -> u64 {
        const LIMITS: [u64; 16] = [
            0,
            1,
            2,
            u64::MAX,
            u64::MAX - 1,
            u32::MAX as u64,
            u16::MAX as u64,
            1 << 63,
            1 << 40,
            (1 << 40) - 1,
            1 << 32,
            1 << 31,
            1 << 24,
            1 << 20,
            4096,
            (1 << 24) - 1,
        ];
        match self.byte() {
            at @ 0..16 => LIMITS[usize::from(at)],
            16..96 => u64::from(self.byte()),
            96..160 => u64::from(self.short()),
            160..208 => self.word::<8>(),
            208..232 => u64::MAX << (self.byte() % 64),
            _ => (1 << (self.byte() % 64)) + u64::from(self.byte()),
        }
    }
}
