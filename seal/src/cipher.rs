//! The calls to AWS-LC: AES-256-GCM in steps, single blocks of AES-256, HMAC-SHA256.
//!
//! The crates with a safe interface to AWS-LC take a message as one buffer. The parts of a page are
//! several buffers, and a put checksums each step while it is in the cache.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};

use aws_lc_sys as aws;
use zeroize::Zeroize;

/// Bytes of a key.
pub(crate) const KEY_BYTES: usize = 32;

/// Bytes of the nonce of AES-GCM.
pub(crate) const NONCE_BYTES: usize = 12;

/// Bytes of a tag.
pub(crate) const TAG_BYTES: usize = 16;

/// Bytes of one call to the cipher. They stay in the first two levels of the cache for the next
/// use: a checksum.
pub(crate) const STEP_BYTES: usize = 16 << 10;

/// AWS-LC refused a call: there is no memory for it, or this crate has a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cipher failed: is there no memory?")]
pub struct CipherError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Seal,
    Open,
}

/// One message of AES-256-GCM in steps.
pub(crate) struct Gcm {
    context: NonNull<aws::EVP_CIPHER_CTX>,
    direction: Direction,
}

impl Gcm {
    /// Begins a message.
    pub(crate) fn begin(
        direction: Direction,
        key: &[u8; KEY_BYTES],
        nonce: &[u8; NONCE_BYTES],
        associated: &[u8],
    ) -> Result<Gcm, CipherError> {
        // SAFETY: takes nothing.
        let context = unsafe { aws::EVP_CIPHER_CTX_new() };
        let context = NonNull::new(context).ok_or(CipherError)?;
        // From here on `drop` frees the context.
        let mut gcm = Gcm { context, direction };
        // SAFETY: takes nothing; the cipher is a constant of the library.
        let cipher = unsafe { aws::EVP_aes_256_gcm() };
        let encrypts = c_int::from(direction == Direction::Seal);
        // SAFETY: the context is this one's own, the cipher takes 32 bytes of key and 12 of nonce
        // by default, and both are read before the call returns. There is no engine.
        let begun = unsafe {
            aws::EVP_CipherInit_ex(
                context.as_ptr(),
                cipher,
                null_mut(),
                key.as_ptr(),
                nonce.as_ptr(),
                encrypts,
            )
        };
        if begun != 1 {
            return Err(CipherError);
        }
        for step in associated.chunks(STEP_BYTES) {
            gcm.update(step.as_ptr(), null_mut(), step.len())?;
        }
        Ok(gcm)
    }

    /// Encrypts or decrypts the next bytes in place, in steps. `each` sees the result of a step.
    pub(crate) fn in_place(
        &mut self,
        bytes: &mut [u8],
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), CipherError> {
        for step in bytes.chunks_mut(STEP_BYTES) {
            let at = step.as_mut_ptr();
            self.update(at, at, step.len())?;
            each(step);
        }
        Ok(())
    }

    /// Encrypts or decrypts the next bytes into others. Both have one length.
    pub(crate) fn copy(&mut self, from: &[u8], to: &mut [u8]) -> Result<(), CipherError> {
        if from.len() != to.len() {
            return Err(CipherError);
        }
        for (from, to) in from.chunks(STEP_BYTES).zip(to.chunks_mut(STEP_BYTES)) {
            self.update(from.as_ptr(), to.as_mut_ptr(), from.len())?;
        }
        Ok(())
    }

    /// The tag of an encrypted message.
    pub(crate) fn tag(mut self) -> Result<[u8; TAG_BYTES], CipherError> {
        let mut tag = [0; TAG_BYTES];
        let is_done = self.direction == Direction::Seal
            && self.finish()
            && self.control(aws::EVP_CTRL_AEAD_GET_TAG, &mut tag);
        if is_done { Ok(tag) } else { Err(CipherError) }
    }

    /// Whether the tag is that of the decrypted message. The comparison takes constant time.
    pub(crate) fn has_tag(&mut self, tag: &[u8; TAG_BYTES]) -> bool {
        let mut tag = *tag;
        self.direction == Direction::Open
            && self.control(aws::EVP_CTRL_AEAD_SET_TAG, &mut tag)
            && self.finish()
    }

    /// One call to the cipher. The callers hold the slices from which they take `from` and `to`:
    /// `length` bytes each, the same ones or apart. A null `to` makes the bytes associated data.
    fn update(&mut self, from: *const u8, to: *mut u8, length: usize) -> Result<(), CipherError> {
        let length = c_int::try_from(length).map_err(|_| CipherError)?;
        let mut written = 0;
        // SAFETY: see above. GCM writes as many bytes as it reads, and takes one buffer for both.
        let done = unsafe {
            aws::EVP_CipherUpdate(self.context.as_ptr(), to, &raw mut written, from, length)
        };
        if done == 1 && written == length {
            Ok(())
        } else {
            Err(CipherError)
        }
    }

    /// Ends the message. With a direction of `Open`: whether its tag is right.
    fn finish(&mut self) -> bool {
        let mut rest = [0_u8; TAG_BYTES];
        let mut written = 0;
        // SAFETY: GCM writes nothing here; another cipher would write one block of 16 bytes.
        let done = unsafe {
            aws::EVP_CipherFinal_ex(self.context.as_ptr(), rest.as_mut_ptr(), &raw mut written)
        };
        done == 1
    }

    fn control(&mut self, command: c_int, tag: &mut [u8; TAG_BYTES]) -> bool {
        let Ok(bytes) = c_int::try_from(TAG_BYTES) else {
            return false;
        };
        let tag = tag.as_mut_ptr().cast::<c_void>();
        // SAFETY: both commands read or write as many bytes of the tag as the third argument says.
        let done = unsafe { aws::EVP_CIPHER_CTX_ctrl(self.context.as_ptr(), command, bytes, tag) };
        done == 1
    }
}

impl Drop for Gcm {
    fn drop(&mut self) {
        // SAFETY: `begin` made the context, and nothing else has it. The key schedule in it is
        // wiped.
        unsafe { aws::EVP_CIPHER_CTX_free(self.context.as_ptr()) };
    }
}

/// Encrypts single blocks under a key.
pub(crate) struct Blocks {
    schedule: aws::AES_KEY,
}

impl Blocks {
    pub(crate) fn new(key: &[u8; KEY_BYTES]) -> Result<Blocks, CipherError> {
        let mut schedule = MaybeUninit::<aws::AES_KEY>::zeroed();
        // SAFETY: the key has 256 bits, and the schedule is memory of its size.
        let set = unsafe { aws::AES_set_encrypt_key(key.as_ptr(), 256, schedule.as_mut_ptr()) };
        if set != 0 {
            return Err(CipherError);
        }
        // SAFETY: every byte was zeroed, and all of its fields are integers.
        let schedule = unsafe { schedule.assume_init() };
        Ok(Blocks { schedule })
    }

    pub(crate) fn encrypt(&self, block: &[u8; 16]) -> [u8; 16] {
        let mut out = [0; 16];
        // SAFETY: both blocks have 16 bytes, and `new` made the schedule.
        unsafe { aws::AES_encrypt(block.as_ptr(), out.as_mut_ptr(), &raw const self.schedule) };
        out
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        let (at, bytes) = (&raw mut self.schedule, size_of::<aws::AES_KEY>());
        // SAFETY: the memory is this one's own, and zeros are a valid schedule.
        unsafe { aws::OPENSSL_cleanse(at.cast(), bytes) };
    }
}

/// HMAC-SHA256.
pub(crate) fn hmac(key: &[u8; KEY_BYTES], text: &[u8]) -> Result<[u8; 32], CipherError> {
    let mut out = [0; 32];
    let mut written = 0;
    // SAFETY: takes nothing; the digest is a constant of the library.
    let digest = unsafe { aws::EVP_sha256() };
    // SAFETY: lengths are those of the slices, and the digest has 32 bytes.
    let done = unsafe {
        aws::HMAC(
            digest,
            key.as_ptr().cast(),
            key.len(),
            text.as_ptr(),
            text.len(),
            out.as_mut_ptr(),
            &raw mut written,
        )
    };
    if done.is_null() || written != 32 {
        out.zeroize();
        return Err(CipherError);
    }
    Ok(out)
}

// SAFETY: a context has no tie to the thread that made it, and `&Gcm` gives no access to it.
unsafe impl Send for Gcm {}

#[cfg(test)]
#[path = "cipher/tests.rs"]
mod tests;
