//! Messages over a Unix socket with a file attached.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Writes to a socket; the file is attached to the first bytes.
pub(super) struct Giving<'a> {
    pub stream: &'a UnixStream,
    pub file: Option<BorrowedFd<'a>>,
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

/// Reads from a socket, and keeps the last file received. Other files are closed.
pub(super) struct Taking {
    pub stream: Arc<UnixStream>,
    pub file: Option<OwnedFd>,
}

impl Read for Taking {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(bytes)];
        let got = recvmsg(
            &self.stream,
            &mut iov,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
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

    use std::os::fd::AsFd;

    use super::*;
    use crate::share::wire::{Reply, parse, receive, send};

    #[test]
    fn a_file_comes_with_its_message_and_with_no_other() {
        let (one, other) = UnixStream::pair().unwrap();
        let other = Arc::new(other);
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        for given in [Some(file.as_fd()), None] {
            let mut giving = Giving {
                stream: &one,
                file: given,
            };
            send(&mut giving, &mut Vec::new(), &Reply::Area).unwrap();
            let mut taking = Taking {
                stream: other.clone(),
                file: None,
            };
            let mut buffer = Vec::new();
            assert!(receive(&mut taking, &mut buffer).unwrap());
            assert!(matches!(parse(&buffer).unwrap(), Reply::Area));
            let bytes = taking
                .file
                .map(|file| rustix::fs::fstat(file).unwrap().st_size);
            assert_eq!(bytes, given.map(|_| 4096));
        }
    }
}
