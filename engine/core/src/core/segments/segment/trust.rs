//! The certainty that the content of a segment is on the device.

use larder_format::Serial;

use super::{Body, Content, Extension, InDoubt, Segment, Stage, State, Trust};

impl Segment {
    /// Highest commit number written here.
    pub(in crate::core) fn last_commit(&self) -> Serial {
        self.content().map_or(Serial::ZERO, |it| it.last_commit)
    }

    /// Payload of commits up to here is on the device for certain.
    pub(in crate::core) fn proven(&self) -> Serial {
        self.content().map_or(Serial::ZERO, |it| it.proven)
    }

    /// Everything written into it is on the device. An earlier header may have proven more than the
    /// last block that can be read: that is lost, and stays so.
    pub(in crate::core) fn prove(&mut self) {
        if let Body::Written(content) = &mut self.body {
            let end = content.trust_end.unwrap_or(content.last_commit);
            content.proven = content.proven.max(content.last_commit.min(end));
        }
    }

    /// It holds writes above this watermark that are not proven.
    pub(in crate::core) fn is_beyond(&self, mark: Serial) -> bool {
        self.last_commit() > mark.max(self.proven())
    }

    /// The hole behind this commit stays: no header may prove blocks behind it.
    pub(super) fn end_trust(&mut self, commit: Serial) {
        let trust_end = &mut self.content_mut().trust_end;
        *trust_end = Some(trust_end.map_or(commit, |end| end.min(commit)));
    }

    /// A write into it failed. Returns whether it is the first.
    pub(in crate::core::segments) fn poison(&mut self) -> bool {
        !std::mem::replace(&mut self.content_mut().is_poisoned, true)
    }

    pub(in crate::core) fn is_poisoned(&self) -> bool {
        self.content().is_some_and(|it| it.is_poisoned)
    }

    /// The durable watermark must not reach this commit before a header excludes one of its pages.
    pub(in crate::core) fn hold(&mut self, commit: Serial) {
        self.content_mut().held.push(commit);
    }

    /// Some of its pages are to be excluded by a header.
    pub(in crate::core) fn has_held(&self) -> bool {
        self.content().is_some_and(|it| !it.held.is_empty())
    }

    /// A header excludes the pages that are not to be trusted. Returns the commits of these.
    pub(in crate::core) fn take_held(&mut self) -> Vec<Serial> {
        std::mem::take(&mut self.content_mut().held)
    }

    fn trust(&self) -> Trust {
        self.content().map_or(Trust::Whole, |it| it.trust)
    }

    pub(in crate::core) fn is_suspect(&self) -> bool {
        self.trust() != Trust::Whole
    }

    /// A sync failed. It may have lost something of this segment, and headers written since the
    /// last good sync. A header that is being written counts for nothing, and the records that the
    /// segment takes may be lost with its others.
    pub(in crate::core) fn suspect(&mut self) {
        self.is_header_current = false;
        match self.stage_mut() {
            Some(Stage::Extended(extension, _)) => *extension = Extension::Records,
            Some(Stage::Sealing(extension, in_doubt)) => {
                *extension = extension.map(|_| Extension::Records);
                *in_doubt = InDoubt(true);
            }
            _ => {}
        }
        let is_emptied = matches!(self.state(), State::Emptied | State::Releasing);
        let content = self.content_mut();
        content.trust = match content.trust {
            Trust::Whole if is_emptied => Trust::Rewritten,
            Trust::Whole => Trust::Suspect,
            trust => trust,
        };
    }

    /// All of a suspect lies elsewhere too, or is forgotten.
    pub(in crate::core) fn note_rewritten(&mut self) {
        self.content_mut().trust = Trust::Rewritten;
    }

    /// Something of a suspect found no room elsewhere.
    pub(in crate::core) fn suspect_again(&mut self) {
        self.content_mut().trust = Trust::Suspect;
    }

    /// A failed sync may have lost something that lies nowhere else.
    pub(in crate::core) fn is_unsure(&self) -> bool {
        match self.trust() {
            Trust::Whole => false,
            Trust::Suspect => true,
            Trust::Rewritten => self.is_forwarding() || self.is_stuck(),
        }
    }

    /// Recovery finds each record that was written into it: it is sealed, and no write or sync that
    /// failed has touched it.
    pub(in crate::core) fn holds_records(&self) -> bool {
        let is_good = |content: &Content| !content.is_poisoned && content.trust_end.is_none();
        self.state() == State::Sealed && !self.is_suspect() && self.content().is_some_and(is_good)
    }
}
