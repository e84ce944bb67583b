//! Cursors that read and write little-endian fields in order.
//!
//! A [`Reader`] never reads past its slice: a slice that is too short returns [`Overrun`] and does
//! not panic. A [`Writer`] fills a block whose layout this crate fixes at compile time, so running
//! out of space there is a bug of this crate.

/// A structure ended before its last field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overrun;

/// Reads fields in order from a slice.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline]
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    #[inline]
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Overrun> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(Overrun)?;
        self.rest = rest;
        Ok(*head)
    }

    #[inline]
    pub(crate) fn u8(&mut self) -> Result<u8, Overrun> {
        self.array().map(u8::from_le_bytes)
    }

    #[inline]
    pub(crate) fn u16(&mut self) -> Result<u16, Overrun> {
        self.array().map(u16::from_le_bytes)
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Result<u32, Overrun> {
        self.array().map(u32::from_le_bytes)
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> Result<u64, Overrun> {
        self.array().map(u64::from_le_bytes)
    }

    #[inline]
    pub(crate) fn slice(&mut self, bytes: usize) -> Result<&'a [u8], Overrun> {
        let (head, rest) = self.rest.split_at_checked(bytes).ok_or(Overrun)?;
        self.rest = rest;
        Ok(head)
    }

    #[inline]
    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }
}

/// Whether every byte is zero. There is no early exit, so the loop vectorizes.
#[inline]
pub(crate) fn all_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |set, byte| set | byte) == 0
}

/// Writes fields in order into a slice that is already zeroed.
pub(crate) struct Writer<'a> {
    rest: &'a mut [u8],
}

impl<'a> Writer<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Writer { rest: bytes }
    }

    /// Takes the next bytes; the caller fills them.
    fn take(&mut self, bytes: usize) -> &'a mut [u8] {
        let rest = std::mem::take(&mut self.rest);
        let Some((head, tail)) = rest.split_at_mut_checked(bytes) else {
            unreachable!("a structure of this crate is longer than its block");
        };
        self.rest = tail;
        head
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.take(bytes.len()).copy_from_slice(bytes);
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// Skips bytes, which stay zero.
    pub(crate) fn reserved(&mut self, bytes: usize) {
        self.take(bytes);
    }
}
