//! Growable arrays that never move their elements.
//!
//! A `Vec` of ten million entries doubles by copying 320 MB while every lookup waits, and then
//! holds up to twice the memory that it needs. This one grows by chunks of 2^`BITS` elements: none
//! but those of the first chunk ever moves, and at most one chunk is allocated ahead of use.

/// `BITS` of large arrays.
const CHUNK_BITS: u32 = 14;

/// See the module.
#[derive(Debug)]
pub struct Chunks<T, const BITS: u32 = CHUNK_BITS> {
    /// All but the last one in use are full; at most one empty one follows it.
    chunks: Vec<Vec<T>>,
    len: usize,
}

impl<T, const BITS: u32> Chunks<T, BITS> {
    pub const fn new() -> Self {
        Self {
            chunks: Vec::new(),
            len: 0,
        }
    }

    pub const fn len(&self) -> usize {
        self.len
    }

    pub fn push(&mut self, value: T) {
        let chunk = self.len >> BITS;
        if chunk == self.chunks.len() {
            // A short array takes no whole chunk: there may be hundreds of them.
            let ahead = if chunk == 0 { 0 } else { 1 << BITS };
            self.chunks.push(Vec::with_capacity(ahead));
        }
        self.chunks[chunk].push(value);
        self.len += 1;
    }

    pub fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        let chunk = last >> BITS;
        // One empty chunk is kept, so that a length that swings over a chunk's edge does not
        // allocate each time.
        self.chunks.truncate(chunk + 2);
        self.len = last;
        self.chunks[chunk].pop()
    }

    #[inline]
    pub fn get(&self, index: usize) -> &T {
        &self.chunks[index >> BITS][index & ((1 << BITS) - 1)]
    }

    #[inline]
    pub fn get_mut(&mut self, index: usize) -> &mut T {
        &mut self.chunks[index >> BITS][index & ((1 << BITS) - 1)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.chunks.iter_mut().flatten()
    }

    /// Bytes allocated.
    pub fn ram_bytes(&self) -> usize {
        let elements: usize = self.chunks.iter().map(Vec::capacity).sum();
        elements * size_of::<T>() + self.chunks.capacity() * size_of::<Vec<T>>()
    }
}

/// Values with long stretches of zeros: a chunk in which no value was ever set takes no
/// memory.
#[derive(Debug, Default)]
pub struct Sparse<T> {
    chunks: Vec<Option<Box<[T]>>>,
}

impl<T: Copy + Default + PartialEq> Sparse<T> {
    pub const fn new() -> Self {
        Self { chunks: Vec::new() }
    }

    #[inline]
    pub fn get(&self, index: usize) -> T {
        let chunk = self.chunks.get(index >> CHUNK_BITS);
        let chunk = chunk.and_then(Option::as_ref);
        chunk.map_or_else(T::default, |chunk| chunk[index & ((1 << CHUNK_BITS) - 1)])
    }

    pub fn set(&mut self, index: usize, value: T) {
        let at = index >> CHUNK_BITS;
        let is_zero = value == T::default();
        if at >= self.chunks.len() {
            if is_zero {
                return;
            }
            self.chunks.resize_with(at + 1, || None);
        }
        let chunk = &mut self.chunks[at];
        if is_zero && chunk.is_none() {
            return;
        }
        let chunk =
            chunk.get_or_insert_with(|| vec![T::default(); 1 << CHUNK_BITS].into_boxed_slice());
        chunk[index & ((1 << CHUNK_BITS) - 1)] = value;
    }

    /// Bytes allocated.
    pub fn ram_bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten();
        let elements: usize = chunks.map(|chunk| size_of_val(&**chunk)).sum();
        elements + self.chunks.capacity() * size_of::<Option<Box<[T]>>>()
    }
}
