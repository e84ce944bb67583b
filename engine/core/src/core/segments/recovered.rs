//! The segments as recovery found them.

use super::Segments;
use super::segment::{Segment, Stream};
use crate::core::types::{Recovered, SegmentInit};

impl Segments {
    /// Takes over the segments of a recovery.
    pub(in crate::core) fn recovered(segment_blocks: u32, recovered: &Recovered) -> Segments {
        let segments = recovered_segments(&recovered.volumes, &recovered.segments);
        let mut segments = Segments::new(segment_blocks, &recovered.volumes, segments);
        if !recovered.clean {
            segments.mark_all_dirty();
        }
        segments
    }
}

/// On each volume at most one open segment per stream stays open.
pub(super) fn recovered_segments(volumes: &[u32], list: &[SegmentInit]) -> Vec<Segment> {
    let mut segments = Vec::with_capacity(list.len());
    let mut rest = list.iter();
    for count in volumes {
        let mut streams = [Stream::Put, Stream::Copy].into_iter();
        let own = rest.by_ref().take(*count as usize);
        segments.extend(own.map(|init| Segment::recovered(init, || streams.next())));
    }
    segments
}
