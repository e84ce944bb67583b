//! The form for a processor.

use crate::portable;

/// One form of the code. A value of this type is for a processor that has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(debug_assertions)]
    SkipsAnEscape,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Form {
    /// The forms that this processor has. The last one is the fastest.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut found = vec![Self(Kind::Portable)];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            found.push(Self(Kind::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            found.push(Self(Kind::Neon));
        }
        found
    }

    /// The fastest form of this processor.
    #[must_use]
    pub fn best() -> Self {
        Self::all().pop().unwrap_or(Self(Kind::Portable))
    }

    /// A wrong form, for a test of tests: it skips the first escape of each block.
    #[cfg(debug_assertions)]
    #[doc(hidden)]
    #[must_use]
    pub fn that_skips_an_escape() -> Self {
        Self(Kind::SkipsAnEscape)
    }

    /// The name of the instructions.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(debug_assertions)]
            Kind::SkipsAnEscape => "portable, with a mistake",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "AVX2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "NEON",
        }
    }

    /// See [`portable::encode`].
    pub(crate) fn encode(self, plain: &[u8], base: u8, out: &mut [u8]) -> Option<(usize, u32)> {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` found these instructions.
            Kind::Avx2 => unsafe { crate::avx2::encode(plain, base, out) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `all` found these instructions.
            Kind::Neon => unsafe { crate::neon::encode(plain, base, out) },
            _ => portable::encode(plain, base, out),
        }
    }

    /// See [`portable::decode`].
    pub(crate) fn decode(self, stored: &[u8], base: u8, plain: &mut [u8]) -> Option<u32> {
        match self.0 {
            Kind::Portable => portable::decode(stored, base, plain),
            #[cfg(debug_assertions)]
            Kind::SkipsAnEscape => portable::decode_and_skip(stored, base, plain),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` found these instructions.
            Kind::Avx2 => unsafe { crate::avx2::decode(stored, base, plain) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `all` found these instructions.
            Kind::Neon => unsafe { crate::neon::decode(stored, base, plain) },
        }
    }

    /// Brings memory into the caches, where the instructions can ask for it.
    pub(crate) fn fetch(self, bytes: &[u8]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` found these instructions.
            Kind::Avx2 => unsafe { crate::avx2::fetch(bytes) },
            _ => (),
        }
    }

    /// See [`portable::sum`].
    pub(crate) fn sum(self, plain: &[u8]) -> u32 {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` found these instructions.
            Kind::Avx2 => unsafe { crate::avx2::sum(plain) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `all` found these instructions.
            Kind::Neon => unsafe { crate::neon::sum(plain) },
            _ => portable::sum(plain),
        }
    }
}
