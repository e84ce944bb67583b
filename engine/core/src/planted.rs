//! The bugs of the engine that a simulation can plant: see [`mod@larder_base::bugs`].

#[cfg(debug_assertions)]
pub use larder_base::bugs::plant;

larder_base::bugs! {
    /// Bugs that show in a store that one process uses.
    STORE: {
        /// A get returns bytes without checking their checksum.
        SkippedChecksum,
        /// A get whose deadline passes returns while the device still reads into the caller's
        /// memory.
        LateRead,
        /// A page becomes visible, and its put returns, when its descriptor is written,
        /// although its bytes may not be.
        EarlyPublish,
        /// Pages are acknowledged in a segment whose first header is still being written.
        UnopenedSegment,
        /// A put that a deletion overtook becomes visible all the same.
        UndeadPut,
        /// A flush returns before anything has been synced.
        EarlyFlush,
        /// A put of a stored page returns before the first copy is as durable as the policy
        /// requires.
        EarlyDuplicate,
        /// Writes mark only the first volume for the next sync.
        ForgottenVolume,
        /// A segment is sealed, with a header that proves all its pages, before a sync has
        /// covered them.
        EarlySeal,
        /// A failed sync is retried, and the second result is trusted.
        RetriedSync,
        /// Deletions and namespaces that a failed sync may have lost are not written again.
        ForgottenNotes,
        /// A segment takes further writes after a write into it has failed.
        UnpoisonedSegment,
        /// The group of a page whose bytes failed after its descriptor was written counts as
        /// complete.
        UnheldGroup,
        /// A segment is released while readers have it pinned.
        MissingPin,
        /// A segment is released before the pages and records forwarded out of it are durable.
        EarlyRelease,
        /// A segment is written again before its free header is durable.
        EarlyReuse,
        /// Reclaim drops a deletion though an older generation that may hold the page is still
        /// on disk.
        DroppedDeletion,
        /// Evictions are not recorded.
        UnwrittenEviction,
        /// The holdings of a clean close are not compared with the store.
        BlindClosing,
        /// A put that fails leaves no record of it.
        UnvoidedFailure,
        /// The record of a failed put removes the older pages of its key, too.
        VoidsOlder,
        /// Pages are evicted for a page that no volume takes.
        EvictionInVain,
        /// Recovery takes descriptor blocks of a segment's earlier generations.
        StaleSequence,
        /// Recovery stops at the first block that it does not expect.
        FirstGapEnds,
        /// Of several records of a key, deletions too, recovery takes the lowest version.
        LowerBirthWins,
        /// Recovery marks every page proven.
        UnprovenProven,
        /// Opening does not begin a new epoch, so that its numbers are used twice.
        RunNotBumped,
        /// A free header that is being written when a sync fails is not written again.
        SureHeader,
        /// A segment is released though the sync that covers its free header has failed.
        HastyFree,
        /// A free header that was answered while a failing sync ran is not written again.
        LaterFree,
        /// A page that the policy of admission refuses is stored all the same.
        DeafAdmission,
        /// The policy of admission is asked for pages that are stored, too.
        StrictAdmission,
        /// Eviction takes pages of groups below their minima.
        DeafMinimum,
        /// A put takes its group above the maximum.
        DeafMaximum,
        /// Pages are served whatever their age.
        Ageless,
        /// Old pages are removed, whether the clock is right or not.
        HastyExpiry,
        /// The clock of the store is not noted while it is in use.
        UnnotedClock,
        /// The clock of the store is the time of day at the open.
        WallClock,
        /// A page that reclaim copies counts as put then.
        RenewedAge,
        /// The times of puts are not read at an open.
        UnreadPuts,
        /// A recall ends while the put reads the caller's memory.
        HastyRecall,
        /// A write that ends after the recall of its put counts as landed.
        RecalledWrite,
        /// A page that a policy names is evicted, leased or not.
        LeaselessPolicy,
        /// The learned policy keeps a leaf whose page has left.
        KeptLeaf,
        /// The learned policy loses a leaf that changes its class.
        LostLeaf,
        /// The learned policy takes a leaf for as old as it was when it was filed.
        ColdLeaf,
        /// The learned policy names a page that has got a child.
        NamedParent,
        /// Of a chain that reclaim evicts, only the first page is missed in its segment.
        UnbookedChain,
        /// The learned policy takes lessons without a check of their values.
        BlindLessons,
        /// The side file of a store is taken without a check of its bytes.
        BlindSideFile,
        /// What a side file says of pages counts, of whatever run it is.
        StaleSideFile,
        /// A close does not write the side file.
        UnkeptPages,
        /// A put reports failed writes of page data as landed.
        IgnoredFailure,
        /// A get releases its pins before its reads have ended.
        EarlyUnpin,
        /// A get drops its findings about damaged pages.
        UnreportedDamage,
        /// An open evicts the pages that are beyond the limit.
        EvictsAtOpen,
        /// Reclaim drops a page at the first read that fails.
        HastyLoss,
        /// Reclaim reports failed writes of moved pages as written.
        IgnoredMove,
        /// A flush returns success, also when it failed.
        DeafFlush,
        /// A deletion returns before it is recorded.
        EarlyDelete,
        /// A deletion without room for its record fails at once.
        HastyDelete,
        /// The housekeeper is not called for reclaim.
        DeafKeeper,
        /// A counted lease does not keep its page.
        LooseLease,
        /// A pinned page is evicted like any other.
        UnkeptPin,
        /// Reclaim carries no pins along.
        DroppedPin,
        /// A pin counts for a page that was put after it.
        HauntingPin,
        /// A segment that keeps pages is reported as emptied.
        VainEmptying,
        /// The decoder of the codec skips an escape.
        SkippedEscape,
        /// A page that takes the place of another one in the index keeps the length of that one.
        KeptLength,
        /// A page is decoded twice.
        DecodedTwice,
        /// The sums of a decoded page are not checked.
        UncheckedSum,
        /// Callers who keep books are not told of pages that eviction takes.
        UntoldEviction,
        /// A page is encrypted again with the salt that it had before.
        SaltKept,
        /// The salt of a page follows from the moment, as its serial does: a copied store has it
        /// twice.
        SaltOfSerial,
        /// The tag of a page covers its place.
        LocationInAad,
        /// A keyring that cannot be read is taken for an empty one.
        EmptyKeyring,
        /// A page may be durable before the key of its tenant.
        KeyAfterPage,
        /// An encrypted page whose tag is wrong, and whose stored bytes are right, is dropped.
        FindingDropsSealed,
        /// A get does not look at the tag of a page.
        TagSkipped,
        /// Recovery takes pages whose key is erased.
        ErasedRecovered,
        /// A tenant is erased before the keyring without it is durable.
        HastyErasure,
    }
    /// Bugs that show among an owner and its clients.
    SHARED: {
        /// A page is stored whose key was erased since it was encrypted.
        LateSealed,
        /// An encrypted page of a shared read is decrypted in the memory that all processes map.
        SlotDecryptedInPlace,
        /// A client states that it has wiped a key, and keeps it.
        KeptLentKey,
        /// A tenant counts as erased while a client has its key.
        UnawaitedForget,
        /// The pins of a client that has gone are kept.
        KeptPins,
        /// The extents of a client that has gone are kept for good.
        KeptPuts,
        /// The extents of a client that has gone are granted to others while its writes are in
        /// flight.
        EarlyExtents,
        /// The extents of a live client that has not reported its put are granted to others,
        /// though the client may still write there.
        UnkeptExtents,
        /// A client that does not hold its marks yet is granted extents.
        UnmarkedPut,
        /// A pin that a client returns stays on its account, and is returned again when the
        /// client goes.
        DoubleUnpin,
        /// A client's finding on a page counts after the client has returned its pin.
        UnpinnedFinding,
        /// A number that is none of a client's puts is taken for a number of the core's.
        ForeignPut,
        /// The number of a put granted by a former owner is taken for one of this owner's puts.
        FormerPut,
        /// A new owner does not wait for the marks of the former owner's clients.
        UnawaitedMarks,
        /// A put takes the checksum of one page for that of the page before it.
        ShiftedChecksum,
        /// The server passes failed writes of a client on as landed.
        IgnoredLanding,
        /// The server does not notice the end of a client.
        KeptSession,
        /// The watchdog checks no client.
        BlindWatchdog,
        /// A client takes its marks off once the owner has seen them.
        DroppedMarks,
        /// A client reports pages as stored though its owner went without an answer.
        GuessedStatus,
    }
}
