//! Handles in a forked child process that has not executed another program.
//!
//! A forked child has a copy of every descriptor of its parent, and none of the threads. With the
//! volumes' descriptors it would keep the locks of a parent that has gone. With the sockets it
//! would keep connections open without a server. So a handler in the child closes the descriptors
//! of this crate's handles. A handle detects that it was opened before the fork
//! ([`Origin::is_inherited`]): its calls miss or fail, and its drop waits for no thread.
//!
//! Invariants:
//! - the handler takes no lock and allocates nothing: another thread of the parent may have held
//!   any lock at the moment of the fork;
//! - it changes a descriptor only while it leads to the watched file: a number that was closed and
//!   reused is left alone;
//! - the number stays taken: a handle that is dropped in the child closes no descriptor of another;
//! - the parent is not affected: a lock belongs to the open file, which the parent still has open.
//!
//! It does not act in children of `vfork`, `posix_spawn` or a bare `clone`, which execute another
//! program at once; every descriptor is closed then (`O_CLOEXEC`).

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::runtime::descriptors;

/// Slots of one block.
const SLOTS: usize = 128;

/// The content of a slot without a descriptor.
const NO_FD: i32 = -1;

/// Number of forks between the first process that watched a descriptor and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

static FIRST: Block = Block::new();

/// `/dev/null`, opened once, or [`NO_FD`] if it cannot be opened.
static NULL: AtomicI32 = AtomicI32::new(NO_FD);

/// A watched descriptor.
struct Slot {
    is_taken: AtomicBool,
    fd: AtomicI32,
    /// The file that it leads to.
    device: AtomicU64,
    inode: AtomicU64,
}

/// Slots, and the next block of them. Blocks are never freed: the handler may be reading them.
struct Block {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Block {
        Block {
            slots: [const {
                Slot {
                    is_taken: AtomicBool::new(false),
                    fd: AtomicI32::new(NO_FD),
                    device: AtomicU64::new(0),
                    inode: AtomicU64::new(0),
                }
            }; SLOTS],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn following(&self) -> Option<&'static Block> {
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: the pointer is null or that of a leaked block, which lives as long as the
        // process.
        unsafe { next.as_ref() }
    }

    /// The next block; allocated if there is none.
    fn next_or_new(&self) -> &'static Block {
        if let Some(next) = self.following() {
            return next;
        }
        let new = Box::into_raw(Box::new(Block::new()));
        let swapped =
            self.next
                .compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        let next = match swapped {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: `new` came from a box above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
                other
            }
        };
        // SAFETY: the pointer is that of a leaked block, which lives as long as the process.
        unsafe { &*next }
    }

    fn take_slot(&self) -> Option<&Slot> {
        let mut slots = self.slots.iter();
        slots.find(|slot| !slot.is_taken.swap(true, Ordering::AcqRel))
    }
}

impl Slot {
    fn give_back(&self) {
        self.fd.store(NO_FD, Ordering::Release);
        self.is_taken.store(false, Ordering::Release);
    }

    /// In the child: releases the watched file, if the descriptor still leads there.
    fn let_go(&self) {
        let fd = self.fd.swap(NO_FD, Ordering::AcqRel);
        let file = (
            self.device.load(Ordering::Acquire),
            self.inode.load(Ordering::Acquire),
        );
        self.is_taken.store(false, Ordering::Release);
        if fd == NO_FD || file_of(fd).is_ok_and(|found| found != file) {
            return;
        }
        match NULL.load(Ordering::Acquire) {
            // SAFETY: the descriptor is this process's own copy. Its handle was opened before the
            // fork, and does nothing with it but close it.
            NO_FD => drop(unsafe { libc::close(fd) }),
            // SAFETY: as above; the number stays that of an open file.
            null => drop(unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) }),
        }
    }
}

/// Device and inode of the file that a descriptor leads to. Allocates nothing.
fn file_of(fd: i32) -> io::Result<(u64, u64)> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel writes one `stat` to the memory of one.
    if unsafe { libc::fstat(fd, found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, and so has filled it in.
    let found = unsafe { found.assume_init() };
    Ok((found.st_dev, found.st_ino))
}

/// Runs in each child, before `fork` returns there.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let mut block = Some(&FIRST);
    while let Some(some) = block {
        some.slots.iter().for_each(Slot::let_go);
        block = some.following();
    }
}

/// Installs the handler, once in a process. Not by a `Once`: a child would wait for ever for a
/// thread of its parent that was installing it at the fork. The child installs it again.
fn install() {
    static INSTALLER: AtomicU32 = AtomicU32::new(0);
    const INSTALLED: u32 = u32::MAX;
    let own = std::process::id();
    loop {
        match INSTALLER.load(Ordering::Acquire) {
            INSTALLED => return,
            installer if installer == own => std::hint::spin_loop(),
            installer => {
                let swapped =
                    INSTALLER.compare_exchange(installer, own, Ordering::AcqRel, Ordering::Acquire);
                if swapped.is_ok() {
                    install_handler();
                    INSTALLER.store(INSTALLED, Ordering::Release);
                }
            }
        }
    }
}

fn install_handler() {
    let null = descriptors::cover().and_then(|()| {
        let mut options = File::options();
        options.read(true).write(true).open("/dev/null")
    });
    if let Ok(null) = null {
        NULL.store(null.into_raw_fd(), Ordering::Release);
    }
    // SAFETY: the handler is a function of this program, and calls only functions that are allowed
    // in a child of a process with threads: atomics, `fstat`, `dup3` and `close`.
    let outcome = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if outcome != 0 {
        let error = io::Error::from_raw_os_error(outcome);
        tracing::warn!(%error, "no handler for forks: a forked child keeps the store's locks");
    }
}

/// Keeps the file of a descriptor from forked children, until this is dropped.
pub struct Private {
    /// `None` for a descriptor that leads nowhere.
    slot: Option<&'static Slot>,
    origin: Origin,
}

impl fmt::Debug for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Private").field(&self.origin).finish()
    }
}

/// Watches a descriptor. It may be closed before the watch ends.
pub fn keep_private(fd: impl AsFd) -> Private {
    let origin = Origin::here();
    let fd = fd.as_fd().as_raw_fd();
    let Ok((device, inode)) = file_of(fd) else {
        return Private { slot: None, origin };
    };
    let mut block = &FIRST;
    let slot = loop {
        match block.take_slot() {
            Some(slot) => break slot,
            None => block = block.next_or_new(),
        }
    };
    slot.device.store(device, Ordering::Release);
    slot.inode.store(inode, Ordering::Release);
    slot.fd.store(fd, Ordering::Release);
    Private {
        slot: Some(slot),
        origin,
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // In a child the slot may be that of another watch by now.
        if let Some(slot) = self.slot.filter(|_| !self.is_inherited()) {
            slot.give_back();
        }
    }
}

impl Private {
    /// Whether this process is a forked child of the process that watches the descriptor.
    pub fn is_inherited(&self) -> bool {
        self.origin.is_inherited()
    }
}

/// The process that created an object.
#[derive(Clone, Copy, Debug)]
pub struct Origin(u32);

impl Origin {
    /// This process.
    #[must_use]
    pub fn here() -> Origin {
        install();
        Origin(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this process is a forked child of that one.
    #[must_use]
    pub fn is_inherited(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::fd::FromRawFd;

    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    /// For each of some descriptors, one bit: whether it leads to the same file in a child.
    fn kept_in_child(fds: [i32; 5]) -> i32 {
        let files = fds.map(|fd| file_of(fd).unwrap());
        // SAFETY: the child calls `fstat` and `_exit` alone.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let same = fds.iter().zip(files).enumerate();
                let same = same.map(|(at, (fd, file))| (at, file_of(*fd).unwrap() == file));
                let bits = same.map(|(at, is_same)| i32::from(is_same) << at);
                // SAFETY: it ends this process.
                unsafe { libc::_exit(bits.sum()) }
            }
            ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
                WaitStatus::Exited(_, code) => code,
                other => panic!("{other:?}"),
            },
        }
    }

    #[test]
    fn a_child_releases_private_files_and_no_number_that_was_reused() {
        // More than the slots of one block.
        let files: Vec<File> = (0..SLOTS + 2)
            .map(|_| tempfile::tempfile().unwrap())
            .collect();
        let mut privates: Vec<Private> = files.iter().map(keep_private).collect();
        let (first, last) = (files[0].as_raw_fd(), files[SLOTS + 1].as_raw_fd());
        // Closed, and reused for another file, while it is still private.
        let other = tempfile::tempfile().unwrap().into_raw_fd();
        let reused = files[1].as_raw_fd();
        // SAFETY: `other` is closed below; the number that it is copied to stays open.
        assert!(unsafe { libc::dup3(other, reused, libc::O_CLOEXEC) } >= 0);
        // No longer private.
        let public = files[2].as_raw_fd();
        drop(privates.swap_remove(2));
        assert_eq!(kept_in_child([first, last, reused, public, other]), 0b11100);
        // The parent has all of them.
        assert!(
            [first, last, reused, public]
                .iter()
                .all(|fd| file_of(*fd).is_ok())
        );
        let origin = Origin::here();
        assert!(!origin.is_inherited());
        // SAFETY: the number has no other owner.
        drop(unsafe { File::from_raw_fd(other) });
    }
}
