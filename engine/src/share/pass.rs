//! Messages over a Unix socket, with a file beside them where that is better.
//!
//! A frame's length has room for a flag, [`ASIDE`]: the frame's bytes are then not in the stream but in a file without a name
//! (`memfd_create(2)`) that comes with the length. A long list of keys goes that way: through a socket it would take a switch
//! between the two processes for every few pages of memory that the kernel buffers. An area's file travels the same way.
//!
//! Faults defended against, besides those of [`wire`](super::wire): a frame that claims to be aside and comes without a file, with
//! one that is too short, or with one that is no memory of this kind, which reading might wait for; files that nobody asked
//! for, which are closed. The file is read into a buffer before it is looked at: its sender may still write to it.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;

use super::wire::{FRAME_BYTES_MAX, WireError, receive_body, receive_length, send};

/// On a frame's length: its bytes are in the file that comes with it.
const ASIDE: u32 = 1 << 31;

/// Shortest frame that goes aside, in bytes: more than a socket holds by default.
const ASIDE_BYTES: usize = 192 << 10;

/// Writes one message, and hands over a file with it.
pub(super) fn send_with<T: Serialize>(
    stream: &UnixStream,
    buffer: &mut Vec<u8>,
    message: &T,
    file: Option<BorrowedFd<'_>>,
) -> Result<(), WireError> {
    let bytes = postcard::experimental::serialized_size(message).map_err(WireError::Nonsense)?;
    if file.is_none() && (ASIDE_BYTES..=FRAME_BYTES_MAX).contains(&bytes) {
        return send_aside(stream, message, bytes);
    }
    send(&mut Giving { stream, file }, buffer, message)
}

fn send_aside<T: Serialize>(
    stream: &UnixStream,
    message: &T,
    bytes: usize,
) -> Result<(), WireError> {
    // Sealing is what tells such a file from others.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("larder-message", flags).map_err(io::Error::from)?;
    let file = std::fs::File::from(file);
    postcard::to_io(message, &file).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    let length = u32::try_from(bytes).unwrap_or(u32::MAX) | ASIDE;
    let mut along = Giving {
        stream,
        file: Some(file.as_fd()),
    };
    along.write_all(&length.to_le_bytes())?;
    Ok(())
}

/// Reads one frame into `buffer`, and the file that came with it if any. `None` at the end of the stream, between two frames.
pub(super) fn receive_with(
    stream: &UnixStream,
    buffer: &mut Vec<u8>,
) -> Result<Option<Along>, WireError> {
    let mut taking = Taking { stream, file: None };
    let Some(length) = receive_length(&mut taking)? else {
        return Ok(None);
    };
    if length & ASIDE == 0 {
        receive_body(&mut taking, length, buffer)?;
        return Ok(Some(Along(taking.file)));
    }
    let file = taking.file.ok_or(WireError::Aside)?;
    read_aside(&file, length & !ASIDE, buffer)?;
    Ok(Some(Along(None)))
}

fn read_aside(file: &OwnedFd, length: u32, buffer: &mut Vec<u8>) -> Result<(), WireError> {
    let bytes = length as usize;
    if bytes > FRAME_BYTES_MAX {
        return Err(WireError::TooLong(bytes));
    }
    // Only memory of this kind has seals; reading it waits for nothing.
    rustix::fs::fcntl_get_seals(file).map_err(|_| WireError::Aside)?;
    let there = rustix::fs::fstat(file).map_err(io::Error::from)?.st_size;
    if u64::try_from(there).unwrap_or(0) < u64::from(length) {
        return Err(WireError::Aside);
    }
    buffer.clear();
    buffer.reserve_exact(bytes);
    while buffer.len() < bytes {
        let at = buffer.len() as u64;
        let read = rustix::io::pread(file, rustix::buffer::spare_capacity(buffer), at);
        if read.map_err(io::Error::from)? == 0 {
            return Err(WireError::Aside);
        }
    }
    buffer.truncate(bytes);
    Ok(())
}

/// The file that came with a message.
pub(super) struct Along(pub Option<OwnedFd>);

/// Writes to a socket; a file goes with the first bytes.
struct Giving<'a> {
    stream: &'a UnixStream,
    file: Option<BorrowedFd<'a>>,
}

impl Write for Giving<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(file) = self.file else {
            return self.stream.write(bytes);
        };
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let iov = [IoSlice::new(bytes)];
        let sent = sendmsg(self.stream, &iov, &mut control, SendFlags::NOSIGNAL)?;
        self.file = None;
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads from a socket, and keeps the last file that came along.
struct Taking<'a> {
    stream: &'a UnixStream,
    file: Option<OwnedFd>,
}

impl Read for Taking<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(bytes)];
        let got = recvmsg(self.stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.file = files.last().or_else(|| self.file.take());
            }
        }
        Ok(got.bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::share::wire::{KEYS_MAX, Request, parse};

    fn memfd(bytes: usize) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        file
    }

    #[test]
    fn messages_of_every_length_arrive_as_they_were_sent() {
        let (one, other) = UnixStream::pair().unwrap();
        let all = vec![7; KEYS_MAX * 32];
        for count in [0, 1, 100, ASIDE_BYTES / 32 - 1, ASIDE_BYTES / 32, KEYS_MAX] {
            let keys = &all[..count * 32];
            let sent = Request::Contains { namespace: 3, keys };
            std::thread::scope(|scope| {
                scope.spawn(|| send_with(&one, &mut Vec::new(), &sent, None).unwrap());
                let mut buffer = Vec::new();
                assert!(receive_with(&other, &mut buffer).unwrap().is_some());
                let Request::Contains { namespace, keys } = parse(&buffer).unwrap() else {
                    panic!("another request");
                };
                assert_eq!((namespace, keys.len()), (3, count * 32));
            });
        }
        drop(one);
        assert!(receive_with(&other, &mut Vec::new()).unwrap().is_none());
    }

    #[test]
    fn a_file_comes_with_its_message() {
        let (one, other) = UnixStream::pair().unwrap();
        let file = memfd(4096);
        send_with(&one, &mut Vec::new(), &Request::Area, Some(file.as_fd())).unwrap();
        let mut buffer = Vec::new();
        let Along(came) = receive_with(&other, &mut buffer).unwrap().unwrap();
        assert!(matches!(parse(&buffer).unwrap(), Request::Area));
        assert_eq!(rustix::fs::fstat(came.unwrap()).unwrap().st_size, 4096);
    }

    #[test]
    fn frames_that_claim_to_be_aside_and_are_not_are_refused() {
        let (pipe, _end) = io::pipe().unwrap();
        let on_disk: OwnedFd = tempfile::tempfile().unwrap().into();
        for (file, bytes) in [
            (None, 10),
            (Some(memfd(9)), 10),
            (Some(pipe.into()), 10),
            (Some(on_disk), 0),
            (Some(memfd(16 << 20)), FRAME_BYTES_MAX + 1),
        ] {
            let (one, other) = UnixStream::pair().unwrap();
            let length = u32::try_from(bytes).unwrap() | ASIDE;
            let mut giving = Giving {
                stream: &one,
                file: file.as_ref().map(AsFd::as_fd),
            };
            giving.write_all(&length.to_le_bytes()).unwrap();
            assert!(receive_with(&other, &mut Vec::new()).is_err(), "{bytes}");
        }
    }
}
