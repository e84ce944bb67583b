//! The sizes of memory pages. A kernel for Arm has small pages of 4, 16 or 64 KiB.

use std::ops::Range;
use std::sync::LazyLock;

/// The sizes of a machine's memory pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSizes {
    small: usize,
}

impl PageSizes {
    /// The sizes where a small page has so many bytes: a power of two, 4096 at least.
    ///
    /// # Panics
    /// If no kernel has pages of this size.
    #[must_use]
    pub const fn of(small: usize) -> PageSizes {
        assert!(small.is_power_of_two() && small >= 4096);
        PageSizes { small }
    }

    /// The sizes of this machine. The system is asked once.
    #[must_use]
    pub fn here() -> PageSizes {
        static HERE: LazyLock<PageSizes> =
            LazyLock::new(|| PageSizes::of(rustix::param::page_size()));
        *HERE
    }

    /// Bytes of a small page.
    #[must_use]
    pub const fn small(self) -> usize {
        self.small
    }

    /// Bytes of a huge page, and its alignment: the memory behind one page of a page table, whose
    /// entries have eight bytes. 2 MiB where a small page has 4 KiB.
    #[must_use]
    pub const fn huge(self) -> usize {
        self.small * (self.small / 8)
    }

    /// The small pages that a range of memory touches, as their first address and their bytes.
    #[must_use]
    pub const fn around(self, address: usize, length: usize) -> (usize, usize) {
        let into_page = address % self.small;
        (address - into_page, length.saturating_add(into_page))
    }

    /// The numbers of the whole huge pages within a range of memory.
    #[must_use]
    pub fn whole_huge(self, address: usize, length: usize) -> Range<usize> {
        address.div_ceil(self.huge())..address.saturating_add(length) / self.huge()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB_4: PageSizes = PageSizes::of(4 << 10);
    const KIB_16: PageSizes = PageSizes::of(16 << 10);
    const KIB_64: PageSizes = PageSizes::of(64 << 10);

    #[test]
    fn huge_pages_are_those_of_a_page_table_of_the_small_ones() {
        let huge = [KIB_4, KIB_16, KIB_64].map(|sizes| sizes.huge() >> 20);
        assert_eq!(huge, [2, 32, 512]);
    }

    #[test]
    fn a_range_is_widened_to_the_pages_of_the_machine() {
        let at = (3 << 20) + 4096;
        assert_eq!(KIB_4.around(at, 8192), (at, 8192));
        assert_eq!(KIB_16.around(at, 8192), (3 << 20, 12288));
        assert_eq!(KIB_64.around(at + 64, 1), (3 << 20, 4161));
    }

    #[test]
    fn whole_huge_pages_of_each_size_are_found_in_a_range() {
        let range = |sizes: PageSizes| sizes.whole_huge(3 << 20, 1600 << 20);
        assert_eq!(range(KIB_4), 2..801);
        assert_eq!(range(KIB_16), 1..50);
        assert_eq!(range(KIB_64), 1..3);
        assert!(KIB_64.whole_huge(512 << 20, 511 << 20).is_empty());
    }
}
