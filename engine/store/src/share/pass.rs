//! Messages over a Unix socket with a file attached.

use larder_base::system::sockets::{self, UnixStream};
use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Writes to a socket; the file is attached to the first bytes.
pub(super) struct Giving<'a> {
    pub stream: &'a UnixStream,
    pub file: Option<BorrowedFd<'a>>,
}

impl Write for Giving<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = sockets::send(self.stream, bytes, self.file)?;
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
        let (count, file) = sockets::receive(&self.stream, bytes)?;
        self.file = file.or_else(|| self.file.take());
        Ok(count)
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
