//! The segments as recovery found them.

use super::Segments;
use super::segment::{Segment, State, Stream};
use crate::core::types::{InitState, Recovered};

impl Segments {
    /// Takes over the segments of a recovery.
    pub(in crate::core) fn recovered(segment_blocks: u32, recovered: &Recovered) -> Segments {
        let segments = recovered_segments(recovered);
        let mut segments = Segments::new(segment_blocks, &recovered.volumes, segments);
        if !recovered.clean {
            segments.mark_all_dirty();
        }
        segments
    }
}

/// On each volume at most one open segment per stream stays
/// open.
fn recovered_segments(recovered: &Recovered) -> Vec<Segment> {
    let mut segments = Vec::with_capacity(recovered.segments.len());
    let mut rest = recovered.segments.iter();
    for count in &recovered.volumes {
        let mut streams = [Stream::Put, Stream::Copy].into_iter();
        for init in rest.by_ref().take(*count as usize) {
            let state = match init.state {
                InitState::Free => State::Free,
                InitState::Lost => State::Lost,
                InitState::Unreadable => State::Unreadable,
                InitState::Open => streams.next().map_or(State::Sealed, State::Open),
                InitState::Closed | InitState::Sealed => State::Sealed,
            };
            let mut segment = Segment::recovered(state, init.sequence);
            if !matches!(state, State::Free | State::Lost) {
                segment.data_end = init.data_end;
                segment.blocks = init.blocks;
                segment.last_commit = init.last_commit;
                segment.proven = init.proven;
            }
            let is_current = matches!(init.state, InitState::Sealed | InitState::Free);
            segment.header_is_current = is_current;
            segments.push(segment);
        }
    }
    segments
}
