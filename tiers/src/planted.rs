//! Bugs that can be planted, to check that the model test detects them: see
//! [`mod@larder_base::bugs`].

#[cfg(debug_assertions)]
pub use larder_base::bugs::plant;
pub(crate) use larder_base::planted;

larder_base::bugs! {
    /// All bugs.
    ALL: {
        /// Releasing a lock leaves the nodes near the root locked.
        LockLeak,
        /// A split leaves the front part without its L2 pages.
        SplitForgetsHostRun,
        /// A split leaves the front part without the locks of the whole.
        SplitForgetsLocks,
        /// Eviction takes locked nodes.
        EvictsLocked,
        /// A node whose last child has left is not offered to eviction.
        StaleLeafSet,
        /// Requests with different salts share nodes.
        SaltIgnored,
        /// An insert frees the tree's pages instead of the request's if the tree already has the
        /// tokens.
        FreesTheTreesPages,
        /// An insert does not free the pages of tokens that the tree already has.
        KeepsDuplicates,
        /// A match does not report loads in flight on its path.
        HitOnUnfinishedLoad,
        /// A backup does not wait for the forward that writes its pages.
        BackupBeforeForward,
        /// A failed forward has no effect.
        IgnoresFailedForward,
        /// A request continues after its own forward, which filled no whole page, has failed.
        RequestOutlivesItsForward,
        /// Pages inserted after a failed forward of the same request stay, although they begin in a
        /// page that the forward filled.
        FailureSparesLaterInserts,
        /// An insert whose pages were lost with another's causes a copy of the pages that take
        /// their place.
        LostInsertsWaitOn,
        /// A loss affects only the last of the parts into which its node was split.
        LossReachesOneFragment,
        /// Requests that hold lost pages are not broken.
        HidesLosses,
        /// A match continues through nodes whose pages were lost.
        MatchesLostPages,
        /// A node whose pages were lost stays when nothing needs it any more.
        KeepsBareNodes,
        /// A load does not wait for the forwards that still use its destination pages.
        LoadBeforeForward,
        /// The end of a request does not note its last forward at the pages of the tree that it
        /// had.
        UntouchedSharedPages,
        /// Pages that an insert frees are loaded while forwards of their request use them.
        UntouchedDuplicates,
        /// A truncation copies rows of pages whose forwards have not ended.
        CutsUnsettledPages,
        /// A truncation copies rows while a forward touches the page that gets them.
        CopiesRowsUnderForward,
        /// A truncation does not note the last forwards of the pages that it gives up.
        UntouchedCut,
        /// A truncated request writes into the page of the tree in which its tokens end.
        CutKeepsTheTreesPage,
        /// The tokens of a truncation stay in the prompt.
        CutKeepsThePrompt,
        /// A request gets rows of another tenant unchanged.
        KeepsForeignRows,
        /// Pages of former weights are matched.
        WeightsIgnored,
        /// A request continues after its weights were replaced.
        OutlivesItsWeights,
        /// Lost pages are freed while requests and loads hold them.
        FreesLostPagesAtOnce,
        /// The end of a backup affects only the last of the parts into which its node was split.
        AckCoversOneFragment,
        /// A failed load leaves its pages in the tree.
        KeepsFailedLoad,
        /// A cancelled prefetch frees pages that a read still writes.
        SlotFreedUnderRead,
        /// A prefetch treats a batch as whole although L3 returned only its front.
        TrustsShortRead,
        /// A prefetched part is inserted below a parent that has left L2.
        InsertsBelowLostParent,
        /// Pages that L3 has are written to it again.
        WritesTwice,
        /// A page is written late without those before it in its chain.
        WritesChildAlone,
        /// New weights drop pages of an L3 that is written late before they are written.
        DropsPromisedPages,
        /// A flush leaves the pages in the window of an L3 that is written late.
        FlushSparesTheWindow,
        /// A copy that has failed is ordered again at once.
        NoPauseAfterFailure,
        /// A failed backup counts as successful.
        TrustsFailedBackup,
        /// Hits are counted each time a request is inserted.
        CountsHitsTwice,
    }
    /// The bugs of hybrid models.
    HYBRID: {
        /// A prefix is continued without the first page of its window.
        WindowOnePageShort,
        /// A prefix is continued with the state at the border before its end.
        StateOfAnotherBorder,
        /// A state at a border is copied after the next forward.
        StateCopiedLate,
        /// Ranks continue the shortest of their longest prefixes.
        MinimumOfLengths,
    }
    /// The bugs of hand-overs between processes.
    HANDOVER: {
        /// A block of memory is lent to two requests.
        LendsTwice,
        /// Memory is lent again as soon as its rows are complete.
        LendsBeforeAnswer,
        /// The decode process uses rows of memory that was taken back meanwhile.
        TrustsReturnedMemory,
        /// All tickets settle with the first layer.
        SettlesAllLayers,
        /// A layer is announced before its rows are in the memory.
        AnnouncesBeforeCopy,
        /// The token of the request that was offered last is sent.
        TokenOfAnother,
        /// Prompts are not compared.
        AnyPrompt,
        /// Rows are written into the pages of a sequence that has ended.
        FillsFreedPages,
        /// A sequence goes on without the rows that did not come.
        KeepsUnfilledRows,
        /// The memory lent to a process that has ended is not returned.
        ForgetsTheDead,
        /// An offer does not end with its time.
        WaitsForEver,
        /// Pages that were neither cached nor handed over count as there.
        SkipsMissingPages,
        /// A device copies rows before the forward that computes them has ended.
        CopiesBeforeForward,
        /// Rows that a device still copies have no tickets.
        TicketsBeforeCopy,
        /// A sequence that ends frees pages that a device still copies from or to.
        FreesUnderCopy,
        /// Memory to which a device still copies rows is lent again.
        LendsUnderCopy,
    }
    /// The bugs of transfers between nodes.
    TRANSFER: {
        /// Chunks are used without a look at their checksums.
        ChunkUnchecked,
        /// A sender sends the rows of the next head.
        HeadsShifted,
        /// The sides do not compare their namespaces.
        NamespaceNotCompared,
        /// The sides do not compare their prompts and weights.
        PromptNotCompared,
        /// Rows that a device still copies count as received.
        ReceivedBeforeCopy,
    }
}
