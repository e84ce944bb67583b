//! The output of `inspect` for each object in a store: as JSON objects and as lines.

use std::path::PathBuf;

use larder_engine::format::{Run, SegmentState, Serial};
use larder_offline::survey::{
    ChainFacts, Condition, NamespaceFacts, Page, Removal, RemovalKind, SegmentFacts, Survey,
    VolumeFacts, VolumeState,
};
use larder_store::recovery::Fate;
use larder_store::recovery::scan::Case;
use serde::Serialize;

use crate::report::{Lines, count, rows};
use crate::size::ByteSize;

/// A volume.
#[derive(Serialize)]
pub struct VolumeRow {
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// `present`, `truncated`, `missing` or `given_up`.
    state: &'static str,
    /// Its length, when it is there.
    volume_bytes: Option<u64>,
    segments: u32,
    /// The epoch of its superblock, if that is usable.
    run: Option<u32>,
}

impl VolumeRow {
    pub fn of(facts: &VolumeFacts) -> Self {
        VolumeRow {
            path: facts.path.clone(),
            state: match facts.state {
                VolumeState::Present => "present",
                VolumeState::Truncated => "truncated",
                VolumeState::Missing => "missing",
                VolumeState::GivenUp => "given_up",
            },
            volume_bytes: facts.bytes,
            segments: facts.segments,
            run: facts.run.map(Run::get),
        }
    }

    pub fn line(&self) -> String {
        let path = self.path.display();
        let segments = count(u64::from(self.segments), "segment");
        match (self.state, self.volume_bytes) {
            ("present", Some(bytes)) => format!("{path}, {}, {segments}", ByteSize(bytes)),
            ("truncated", Some(bytes)) => {
                format!("{path}, TRUNCATED to {bytes} bytes of {segments}")
            }
            ("given_up", _) => format!("{path}, retired or given up, {segments} out of service"),
            _ => format!("{path}, MISSING, {segments}"),
        }
    }
}

/// The state of a segment, in a word. `in_use`: a process may be writing it now.
fn state_of(facts: &SegmentFacts, in_use: bool) -> &'static str {
    match (facts.case, facts.state) {
        (None, _) => "unreachable",
        _ if facts.is_lost => "lost",
        (Some(Case::Blank), _) => "blank",
        (Some(Case::Free), _) => "free",
        (Some(Case::Listed), Some(SegmentState::Open)) => "open",
        (Some(Case::Listed), _) => "sealed",
        (Some(Case::Unlisted | Case::Newer), _) if in_use => "open",
        (Some(Case::Unlisted), _) => "left_open",
        (Some(Case::Newer), _) => "no_header",
        (Some(Case::Hidden), _) if facts.sequence > Serial::ZERO => "no_header",
        (Some(Case::Hidden), _) => "unknown",
    }
}

/// Numbers of segments by state.
#[derive(Default, Serialize)]
pub struct SegmentCounts {
    /// Never written.
    blank: u64,
    /// Without live content.
    free: u64,
    /// Take new pages.
    open: u64,
    /// Were open when the store was left.
    left_open: u64,
    sealed: u64,
    /// Have no usable header: known by their descriptor blocks, or not at all.
    no_header: u64,
    /// Have no usable header and no usable descriptor block.
    lost: u64,
    /// Lie where nothing can be read.
    unreachable: u64,
}

impl SegmentCounts {
    pub fn of(survey: &Survey) -> Self {
        let in_use = survey.condition == Condition::InUse;
        let mut counts = SegmentCounts {
            unreachable: survey.unreachable,
            ..SegmentCounts::default()
        };
        for facts in &survey.segments {
            *match state_of(facts, in_use) {
                "blank" => &mut counts.blank,
                "free" => &mut counts.free,
                "open" => &mut counts.open,
                "left_open" => &mut counts.left_open,
                "sealed" => &mut counts.sealed,
                "lost" => &mut counts.lost,
                "unreachable" => &mut counts.unreachable,
                _ => &mut counts.no_header,
            } += 1;
        }
        counts
    }

    /// As a line, out of this many in all.
    pub fn line(&self, total: u64) -> String {
        let parts = [
            (self.open, "open"),
            (self.left_open, "left open"),
            (self.sealed, "sealed"),
            (self.free, "free"),
            (self.blank, "never written"),
            (self.no_header, "without a header"),
            (self.lost, "LOST"),
            (self.unreachable, "UNREACHABLE"),
        ];
        let parts = parts.iter().filter(|(number, _)| *number > 0);
        let parts: Vec<String> = parts
            .map(|(number, what)| format!("{number} {what}"))
            .collect();
        format!("{total} in all: {}", parts.join(", "))
    }
}

/// A segment.
#[derive(Serialize)]
pub struct SegmentRow {
    volume: usize,
    segment: u32,
    offset: u64,
    state: &'static str,
    /// The row of recovery's table that applied to it.
    case: Option<String>,
    /// Its generation, as `run.counter`.
    sequence: String,
    descriptor_blocks: u32,
    records: u64,
    data_bytes: u64,
    live_pages: u64,
    live_bytes: u64,
    /// Number of faults in it.
    damage_count: u64,
}

impl SegmentRow {
    pub const HEADINGS: [&'static str; 10] = [
        "volume", "segment", "state", "life", "blocks", "records", "data", "pages", "live",
        "damage",
    ];

    pub fn all_of(survey: &Survey) -> Vec<Self> {
        let in_use = survey.condition == Condition::InUse;
        let rows = survey.segments.iter().map(|facts| SegmentRow {
            volume: facts.volume,
            segment: facts.number,
            offset: facts.offset,
            state: state_of(facts, in_use),
            case: facts.case.map(|case| format!("{case:?}").to_lowercase()),
            sequence: facts.sequence.to_string(),
            descriptor_blocks: facts.descriptor_blocks,
            records: facts.records,
            data_bytes: facts.data_bytes,
            live_pages: facts.live_pages,
            live_bytes: facts.live_bytes,
            damage_count: facts.flaws,
        });
        rows.collect()
    }

    pub fn cells(&self) -> [String; 10] {
        [
            self.volume.to_string(),
            self.segment.to_string(),
            self.state.replace('_', " "),
            self.sequence.clone(),
            self.descriptor_blocks.to_string(),
            self.records.to_string(),
            ByteSize(self.data_bytes).to_string(),
            self.live_pages.to_string(),
            ByteSize(self.live_bytes).to_string(),
            self.damage_count.to_string(),
        ]
    }
}

/// A namespace.
#[derive(Serialize)]
pub struct NamespaceRow {
    fingerprint: String,
    /// Live pages, and their bytes.
    pages: u64,
    live_bytes: u64,
    /// Its full record, when the store holds it.
    record: Option<NamespaceRecord>,
}

#[derive(Serialize)]
struct NamespaceRecord {
    model: String,
    weights: String,
    dtype: String,
    layout: String,
    pool: String,
    page_tokens: u32,
    part_bytes: Vec<u32>,
    tp: String,
    pp: String,
    cp: String,
    extra: std::collections::BTreeMap<String, String>,
    /// All of it in a line.
    #[serde(skip)]
    line: String,
}

impl NamespaceRow {
    pub fn all_of(survey: &Survey) -> Vec<Self> {
        survey.namespaces.iter().map(NamespaceRow::of).collect()
    }

    fn of(facts: &NamespaceFacts) -> Self {
        let record = facts.record.as_ref().map(|record| {
            let fields = record.fields().clone();
            NamespaceRecord {
                line: record.to_string(),
                part_bytes: fields.shape.part_sizes().to_vec(),
                model: fields.model,
                weights: fields.weights,
                dtype: fields.dtype,
                layout: fields.layout,
                pool: fields.pool,
                page_tokens: fields.page_tokens,
                tp: fields.tp.to_string(),
                pp: fields.pp.to_string(),
                cp: fields.cp.to_string(),
                extra: fields.extra,
            }
        });
        NamespaceRow {
            fingerprint: facts.fingerprint.to_string(),
            pages: facts.pages,
            live_bytes: facts.bytes,
            record,
        }
    }

    pub fn line(&self) -> String {
        let unknown = "its record is not in the store; known by its fingerprint alone";
        let record = self.record.as_ref().map_or(unknown, |record| &record.line);
        format!(
            "  {}  {}, {}: {record}",
            self.fingerprint,
            count(self.pages, "page"),
            ByteSize(self.live_bytes)
        )
    }
}

/// The chains of a namespace.
#[derive(Serialize)]
pub struct ChainRow {
    fingerprint: String,
    pages: u64,
    /// Pages that head a chain.
    heads: u64,
    /// Pages whose parent is missing: no lookup from the start of their chain finds them.
    orphans: u64,
    /// Pages of the longest unbroken chain.
    longest: u64,
    /// Pages, on average, that are neighbours in their chain and on disk.
    mean_run_pages: f64,
}

impl ChainRow {
    pub const HEADINGS: [&'static str; 6] = [
        "namespace",
        "pages",
        "heads",
        "orphans",
        "longest",
        "pages in a row",
    ];

    pub fn all_of(survey: &Survey) -> Vec<Self> {
        let facts = survey.chains().into_iter().zip(&survey.namespaces);
        let row = |(chains, namespace): (ChainFacts, &NamespaceFacts)| ChainRow {
            fingerprint: namespace.fingerprint.to_string(),
            pages: chains.pages,
            heads: chains.heads,
            orphans: chains.orphans,
            longest: chains.longest,
            mean_run_pages: chains.mean_run_pages(),
        };
        facts.map(row).collect()
    }

    pub fn cells(&self) -> [String; 6] {
        [
            self.fingerprint.clone(),
            self.pages.to_string(),
            self.heads.to_string(),
            self.orphans.to_string(),
            self.longest.to_string(),
            format!("{:.1}", self.mean_run_pages),
        ]
    }
}

/// A record of the requested key.
#[derive(Serialize)]
pub struct KeyRow {
    key: String,
    /// Its namespace's.
    fingerprint: String,
    volume: usize,
    segment: u32,
    /// Offset of its payload in the volume, and its length.
    offset: u64,
    payload_bytes: u64,
    /// The first 24 digits of the key before it in its chain.
    parent: Option<String>,
    depth: u32,
    /// When it was put, in seconds since 1970; 0 if it is not known.
    put_unix_s: u32,
    /// The version of the page, and the commit of the group with this record, as `run.counter`.
    birth: String,
    commit: String,
    /// Whether its bytes are known to be on the device.
    proven: bool,
    /// `live`, `superseded`, `unfinished`, `gone`, `cleared` or `void`.
    fate: &'static str,
    /// The record that removed it.
    removed_by: Option<String>,
}

impl KeyRow {
    pub fn of(survey: &Survey, page: &Page) -> Self {
        let segment = &survey.segments[page.segment];
        let (fate, removed_by) = match page.fate {
            Fate::Live => ("live", None),
            Fate::Superseded => ("superseded", None),
            Fate::Unfinished => ("unfinished", None),
            Fate::Gone(birth) => ("gone", Some(birth)),
            Fate::Cleared(birth) => ("cleared", Some(birth)),
            Fate::Void => ("void", None),
        };
        KeyRow {
            key: page.key.to_string(),
            fingerprint: survey.namespaces[page.namespace].fingerprint.to_string(),
            volume: segment.volume,
            segment: segment.number,
            offset: page.offset,
            payload_bytes: page.bytes,
            parent: page.parent.map(|parent| parent.to_string()),
            depth: page.depth,
            put_unix_s: page.put_unix_s,
            birth: page.birth.to_string(),
            commit: page.commit.to_string(),
            proven: page.proven,
            fate,
            removed_by: removed_by.map(|birth| birth.to_string()),
        }
    }

    pub fn lines(&self, lines: &mut Lines) {
        lines.text(format!(
            "Page {} of namespace {}",
            self.key, self.fingerprint
        ));
        let fate = match &self.removed_by {
            Some(birth) => format!("{}, by the record of birth {birth}", self.fate),
            None => self.fate.to_owned(),
        };
        let parent = self.parent.as_deref().unwrap_or("none known");
        let proven = if self.proven { "proven" } else { "unproven" };
        rows! { lines:
            "  state" => "{}", fate;
            "  place" => "volume {}, segment {}, offset {}, {} bytes",
                self.volume, self.segment, self.offset, self.payload_bytes;
            "  chain" => "depth {}, parent {parent}", self.depth;
            "  born" => "{}, in commit {}, {proven}", self.birth, self.commit;
        }
    }
}

/// A record that removes pages.
#[derive(Serialize)]
pub struct RemovalRow {
    /// `deleted`, `evicted` or `cleared`.
    kind: &'static str,
    /// The namespace's.
    fingerprint: String,
    /// Pages of an older version are gone.
    birth: String,
    commit: String,
    /// The location of the record.
    volume: usize,
    segment: u32,
}

impl RemovalRow {
    pub fn is_clear(removal: &Removal) -> bool {
        removal.kind == RemovalKind::Cleared
    }

    pub fn of(removal: &Removal) -> Self {
        RemovalRow {
            kind: match removal.kind {
                RemovalKind::Deleted => "deleted",
                RemovalKind::Evicted => "evicted",
                RemovalKind::Cleared => "cleared",
            },
            fingerprint: removal.namespace.to_string(),
            birth: removal.birth.to_string(),
            commit: removal.commit.to_string(),
            volume: removal.volume,
            segment: removal.segment,
        }
    }

    pub fn line(&self) -> String {
        format!(
            "{} at {}: the record lies in volume {}, segment {}, commit {}, namespace {}",
            self.kind, self.birth, self.volume, self.segment, self.commit, self.fingerprint
        )
    }
}
