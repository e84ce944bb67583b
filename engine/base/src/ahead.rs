//! Cache lines that are fetched ahead of their use, so that nothing waits for them.

/// Fetches the cache line at the start of a value. Returns at once.
#[inline]
pub fn fetch<T>(value: &T) {
    let start = std::ptr::from_ref(value);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch changes no memory and faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.cast()) }
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        // SAFETY: a prefetch changes no memory and faults at no address.
        unsafe {
            std::arch::asm!(
                "prfm pldl1keep, [{}]",
                in(reg) start,
                options(nostack, readonly, preserves_flags),
            );
        }
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    std::hint::black_box(start);
}
