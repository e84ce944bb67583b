//! Text compressed by zstd: any number of frames, one after the other.
//!
//! A writer makes a frame of each piece, so a file that is cut short is lost from its last piece on
//! alone.

use std::io::{self, BufRead, BufReader, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

/// The first bytes of a frame.
const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();

/// A frame with these bytes.
pub fn frame(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

/// Reads text that may be compressed.
///
/// # Errors
/// Those of `input`.
pub fn reader<R: BufRead + 'static>(mut input: R) -> io::Result<Box<dyn BufRead>> {
    // The first read of a file has as many bytes; a pipe with fewer is no trace.
    let is_compressed = input.fill_buf()?.starts_with(&MAGIC);
    Ok(match is_compressed {
        true => Box::new(BufReader::new(Frames {
            input,
            decoder: FrameDecoder::new(),
            is_within: false,
        })),
        false => Box::new(input),
    })
}

struct Frames<R> {
    input: R,
    decoder: FrameDecoder,
    /// Bytes of a frame are left.
    is_within: bool,
}

impl<R: BufRead> Frames<R> {
    /// Begins the next frame. False at the end of the input.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.input.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.input) {
                Ok(()) => {
                    self.is_within = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = &mut self.input.by_ref().take(length.into());
                    io::copy(skipped, &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_within && !self.begin()? {
                return Ok(0);
            }
            // An error of the input, such as the end that the operator asks for, comes from here.
            self.input.fill_buf()?;
            if !self.decoder.is_finished() {
                let strategy = BlockDecodingStrategy::UptoBytes(bytes.len().max(1));
                let decoded = self.decoder.decode_blocks(&mut self.input, strategy);
                decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            let read = self.decoder.read(bytes)?;
            self.is_within = !(self.decoder.is_finished() && self.decoder.can_collect() == 0);
            if read > 0 {
                return Ok(read);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn frames_give_back_what_was_written_and_plain_text_is_read_as_it_is() {
        let text: Vec<u8> = (0..300_000_u32)
            .flat_map(|at| (at / 7).to_le_bytes())
            .collect();
        let frames: Vec<u8> = text.chunks(100_000).flat_map(frame).collect();
        assert!(frames.len() < text.len());
        for bytes in [frames, text.clone()] {
            let mut read = Vec::new();
            let mut reader = reader(io::Cursor::new(bytes)).unwrap();
            reader.read_to_end(&mut read).unwrap();
            assert_eq!(read, text);
        }
    }

    #[test]
    fn damaged_frames_are_an_error_or_other_bytes_and_no_panic() {
        let whole = frame(&b"{\"hash_ids\": [1, 2, 3]}\n".repeat(200));
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            for bytes in [bytes, whole[..at].to_vec()] {
                let mut reader = reader(io::Cursor::new(bytes)).unwrap();
                let mut limited = (&mut reader).take(1 << 20);
                let _ = limited.read_to_end(&mut Vec::new());
            }
        }
    }
}
