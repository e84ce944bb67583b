//! Random bytes.

use std::io;

/// The most salts that are drawn at once.
const DRAWN_MAX: usize = 64;

/// A source of random bytes: that of the operating system, or of a simulation.
pub trait Random {
    /// Fills memory with random bytes.
    ///
    /// # Errors
    /// The source has none. Nothing is encrypted then.
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()>;
}

impl<F: FnMut(&mut [u8]) -> io::Result<()>> Random for F {
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self(bytes)
    }
}

/// The salts of the pages of one call. They are drawn in groups, which costs a tenth of single
/// draws. Each is used once. Do not keep this between calls: a copied machine would have the same
/// ones.
pub struct Salts<'r> {
    random: &'r mut dyn Random,
    drawn: Vec<[u8; 12]>,
    later: usize,
}

impl<'r> Salts<'r> {
    /// Salts of so many pages. More are drawn when they are needed.
    pub fn of(random: &'r mut dyn Random, pages: usize) -> Salts<'r> {
        Salts {
            random,
            drawn: Vec::new(),
            later: pages,
        }
    }

    pub(crate) fn next(&mut self) -> io::Result<[u8; 12]> {
        if self.drawn.is_empty() {
            let count = self.later.clamp(1, DRAWN_MAX);
            let mut fresh = vec![[0; 12]; count];
            self.random.fill(fresh.as_flattened_mut())?;
            self.later = self.later.saturating_sub(count);
            self.drawn = fresh;
        }
        let none = || io::Error::from(io::ErrorKind::UnexpectedEof);
        self.drawn.pop().ok_or_else(none)
    }
}

/// A nonce for metadata.
pub(crate) fn nonce<const BYTES: usize>(random: &mut dyn Random) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    random.fill(&mut bytes)?;
    Ok(bytes)
}
