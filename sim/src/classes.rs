//! The classes of faults and of crashes, with counts. The counts show that a simulation reaches
//! every class that it has to reach.

use std::fmt;

macro_rules! classes {
    (
        alone { $($name:ident => $title:literal,)* }
        shared { $($many:ident => $many_title:literal,)* }
    ) => {
        /// A fault or a crash.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Class {
            $(#[doc = $title] $name,)*
            $(#[doc = $many_title] $many,)*
        }

        impl Class {
            /// All classes, in the order of the table.
            pub const ALL: &[Class] = &[$(Class::$name,)* $(Class::$many,)*];

            /// Whether the class needs several processes.
            #[must_use]
            pub const fn is_shared(self) -> bool {
                matches!(self, $(Class::$many)|*)
            }

            /// The name of the class in the table.
            #[must_use]
            pub const fn title(self) -> &'static str {
                match self {
                    $(Class::$name => $title,)*
                    $(Class::$many => $many_title,)*
                }
            }
        }
    };
}

classes! {
    alone {
        Kill => "process killed",
        Power => "power lost",
        PowerKeptSome => "power lost, some unsynced blocks kept and some not",
        CrashInOpen => "crash in an opening",
        CrashBeforeFirstWrite => "crash after an opening, before its first write",
        CrashInPut => "crash in a put (page data in flight)",
        CrashInGroup => "crash with descriptors in flight",
        CrashInSegmentOpening => "crash with a segment's first header in flight",
        CrashInSeal => "crash with a sealed header in flight",
        CrashInFree => "crash with a free header in flight",
        CrashInSync => "crash with a sync in flight",
        CrashInReclaim => "crash in reclaim",
        CrashInDelete => "crash in a deletion",
        CrashInFlush => "crash in a flush",
        CrashInClose => "crash in a close",
        CrashAtRest => "crash with nothing in flight",
        TornPrefix => "write torn: only its first blocks",
        TornSubset => "write torn: any of its blocks",
        TornInside => "write torn inside a block, at 512 bytes",
        TornByError => "failed write that left a part behind",
        DataError => "EIO on write: page data",
        DescriptorError => "EIO on write: descriptors",
        HeaderError => "EIO on write: headers",
        SuperblockError => "EIO on write: superblock",
        NoSpace => "ENOSPC on write",
        NoProgress => "short write without progress",
        ShortWrite => "short write, resumed",
        ShortRead => "short read, resumed",
        Interrupted => "EINTR",
        Again => "EAGAIN",
        Cancelled => "ECANCELED",
        VolumeDies => "volume that takes no writes for a while",
        SyncError => "sync failed",
        SyncDropped => "failed sync that dropped dirty blocks",
        SyncLostBefore => "sync that fails, reported after dirty blocks are lost",
        LostWrite => "write acknowledged and lost",
        MisdirectedWrite => "write landed at a wrong address",
        MisdirectedRead => "read from a wrong address",
        RotPayload => "rot: page data",
        RotDescriptor => "rot: descriptor block",
        RotHeader => "rot: one header of a segment",
        RotHeaders => "rot: both headers of a segment",
        RotSuperblock => "rot: one superblock of a volume",
        RotSuperblocks => "rot: two or all superblocks of a volume",
        OpenedByEnd => "volume opened by the superblock at its end",
        VolumeLost => "volume lost: opened without it",
        StoreLost => "first volume lost: store refused",
        Unreadable => "EIO on read, for good",
        ReadErrors => "EIO on read, for some tries",
        Outage => "reads that fail for a while in an opening",
        OutageBeside => "reads of reclaim that fail for a while",
        OpenRefused => "opening refused, because reads of it failed on the way",
        OpenedPartly => "opening with segments that could not be read for a while",
        Emptied => "segments that become zeros after a clean close",
        Delayed => "operation delayed",
        ReadOnlyService => "volume put into read-only service",
        Reordered => "operation overtook an older one of its volume",
        ClockForward => "clock jumped forward",
        ClockFrozen => "clock stood still",
        SyncLostLater => "failed sync that lost writes answered after it began",
        SyncLostInFlight => "write answered after a failed sync that lost it",
        Recalled => "put recalled while it waits",
        ChosenEviction => "page evicted by a policy of the caller",
        NotAdmitted => "page refused by a policy of the caller",
        OverBudget => "page refused by the budget of writes",
        EmptiedForCaller => "segment emptied for a caller, its pages kept",
        CountedLease => "page under a counted lease",
        Pinned => "pinned page",
        EvictionTold => "page that left, told to a caller who keeps books",
        Encoded => "page that a codec made smaller, recorded or found at the end",
        Miscoded => "encoded page with wrong bytes under a right checksum",
        RotKeyring => "rot: one copy of the keyring, or all",
        Erased => "tenant erased",
        Rotated => "wrapping key replaced",
        WrongKey => "opening refused, because its key is a wrong one",
        KeyringLost => "all copies of the keyring lost: store refused",
        Forged => "encrypted page with wrong bytes under a right checksum",
        QuotasChanged => "quotas changed",
        TimeSet => "time of day set while pages have limits of lifetimes",
        OldPageHidden => "page beyond the limit of its group, in the index and absent",
        OldPageRemoved => "page removed for its age",
        ReaderBeside => "page read by a process beside the owner",
    }
    shared {
        ErasedAmongOthers => "tenant erased, beside other processes",
        ErasedInPart => "tenant erased, and a client has not answered",
        RotatedAlone => "wrapping key replaced by a process of its own",
        RotationDeath => "process killed in a rotation of the wrapping key",
        WrongKeyAmongOthers => "process refused, because its key is a wrong one",
        ClientDeath => "client killed",
        ClientDeathInPut => "client killed in a put",
        ClientDeathInGet => "client killed in a get",
        OwnerDeath => "owner killed under its clients",
        Takeover => "store taken over by a client of the previous owner",
        TakeoverInReclaim => "takeover, the previous owner killed in reclaim",
        EmptiedForProcess => "segment emptied for a compaction beside the owner",
        CompactionDeath => "compaction killed",
        HandOver => "store handed over to a client that asked for the ownership",
        ClientStopped => "client stopped for a while",
        ClientStaysStopped => "client stopped until all others have called",
        LateWrite => "write that landed after its process had gone",
        ConnectionLost => "connection lost, both ends alive",
        LateFinding => "finding that arrived after its page's pin was given back",
        AstrayMessage => "message about a finished put, or of a previous owner",
        HastyPut => "put of a client before its marks were known",
        SeekerDeath => "process killed while it looks for an owner",
        OwnerStopped => "owner stopped for a while",
        ClientStoppedInPut => "client stopped in a put",
        ClientStoppedInGet => "client stopped in a get",
        SeekerStopped => "process stopped while it looks for an owner",
        UnstartedWrite => "write of a killed process that never happened",
        WriteOfStopped => "write that landed while its process was stopped",
        LockKept => "lock that outlived its killed process, because of its writes",
        SocketRemoved => "socket's file removed under the owner",
        SocketShort => "read or write of a socket that moved fewer bytes",
        Signal => "wait for a socket interrupted by a signal",
        ConnectionRefused => "connection refused: no process listens",
        ForkedUse => "handle used in a forked process",
        GivenUp => "segment given up with its pages: crashes left no room for copies",
        BufferReused => "memory of a put overwritten after the call",
    }
}

const COUNT: usize = Class::ALL.len();

/// Counts of each class in one run, or in many.
#[derive(Clone, Copy, Debug)]
pub struct Tally {
    times: [u64; COUNT],
    seeds: [u64; COUNT],
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            times: [0; COUNT],
            seeds: [0; COUNT],
        }
    }
}

impl Tally {
    /// Counts one occurrence.
    pub fn count(&mut self, class: Class) {
        self.count_many(class, 1);
    }

    pub(crate) fn count_many(&mut self, class: Class, times: u64) {
        self.times[class as usize] += times;
    }

    /// How often the class occurred.
    #[must_use]
    pub fn times(&self, class: Class) -> u64 {
        self.times[class as usize]
    }

    /// The number of seeds in which the class occurred.
    #[must_use]
    pub fn seeds(&self, class: Class) -> u64 {
        self.seeds[class as usize]
    }

    /// Ends the counts of one seed.
    pub(crate) fn end_seed(&mut self) {
        for (seeds, times) in self.seeds.iter_mut().zip(self.times) {
            *seeds = u64::from(times > 0);
        }
    }

    /// Adds another tally.
    pub fn add(&mut self, other: &Tally) {
        for (own, more) in self.times.iter_mut().zip(other.times) {
            *own += more;
        }
        for (own, more) in self.seeds.iter_mut().zip(other.seeds) {
            *own += more;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>12} {:>10}  fault", "times", "in seeds")?;
        let is_shared = Class::ALL
            .iter()
            .any(|class| class.is_shared() && self.times(*class) > 0);
        for &class in Class::ALL
            .iter()
            .filter(|class| is_shared || !class.is_shared())
        {
            let (times, seeds) = (self.times(class), self.seeds(class));
            writeln!(f, "{times:>12} {seeds:>10}  {}", class.title())?;
        }
        Ok(())
    }
}
