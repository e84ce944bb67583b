//! Models and the parts that ranks hold: who shares pages with whom.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use larder_format::{Fingerprint, Namespace};
use larder_kernels::{Attention, KvCounts, KvShape, Layout};
use larder_tiers::model::{PartError, Stripe};
use larder_tiers::{Model, PrefixCache};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Everything that decides the bytes of a rank's pages.
#[derive(Clone, Debug)]
struct Described {
    name: String,
    weights: String,
    dtype: String,
    counts: KvCounts,
    layers: Range<u32>,
    heads: Range<u32>,
    run: u32,
    turn: u32,
    turns: u32,
    layout: Layout,
}

impl Described {
    /// Every change of [`changed`] to it is a valid model.
    fn draw(dice: &mut Pcg64Mcg) -> Described {
        let mut below = |bound: u32| dice.random_range(0..bound);
        let (first_layer, first_head) = (below(3), below(3));
        let (layers, heads) = (2 + below(4), 2 + below(3));
        let (run, turns) = (1 + below(3), 2 + below(3));
        Described {
            name: format!("model {}", below(100)),
            weights: format!("{}", below(100)),
            dtype: ["bf16", "f16"][below(2) as usize].to_owned(),
            counts: KvCounts {
                attention: [Attention::Mha, Attention::Mla][below(2) as usize],
                layers: first_layer + layers + below(3),
                heads: first_head + heads + below(3),
                head_dim: 1 + below(64),
                value_bytes: 1 + below(4),
                // A multiple of all rounds that a draw or a change makes.
                page_tokens: 5040,
            },
            layers: first_layer..first_layer + layers,
            heads: first_head..first_head + heads,
            run,
            turn: below(turns - 1),
            turns,
            layout: Layout::PageFirstDirect,
        }
    }

    fn model(&self) -> Model {
        let shape = KvShape::new(self.counts).unwrap();
        let stripe = Stripe::new(self.run, self.turn, self.turns).unwrap();
        Model::new(&self.name, &self.weights, &self.dtype, shape)
            .layers(self.layers.clone())
            .and_then(|model| model.heads(self.heads.clone()))
            .and_then(|model| model.positions(stripe))
            .unwrap()
    }

    fn namespace(&self) -> Namespace {
        self.model().namespace(self.layout).unwrap()
    }
}

/// Each with another value of one field. A new field has to be added here, since nothing is left
/// out by `..`.
fn changed(base: &Described) -> Vec<(&'static str, Described)> {
    let Described {
        name,
        weights,
        dtype,
        counts,
        layers,
        heads,
        run,
        turn,
        turns,
        layout,
    } = base.clone();
    let KvCounts {
        attention,
        layers: of_layers,
        heads: of_heads,
        head_dim,
        value_bytes,
        page_tokens,
    } = counts;
    let other_attention = match attention {
        Attention::Mha => Attention::Mla,
        Attention::Mla => Attention::Mha,
    };
    let other_layout = match layout {
        Layout::PageFirstDirect | Layout::LayerFirst => Layout::PageFirst,
        Layout::PageFirst | Layout::PageHead => Layout::PageFirstDirect,
    };
    let mut all = Vec::new();
    let mut add = |field, change: &dyn Fn(&mut Described)| {
        let mut other = base.clone();
        change(&mut other);
        all.push((field, other));
    };
    add("name", &|o| o.name = format!("{name}x"));
    add("weights", &|o| o.weights = format!("{weights}x"));
    add("dtype", &|o| o.dtype = format!("{dtype}x"));
    add("attention", &|o| o.counts.attention = other_attention);
    add("model layers", &|o| o.counts.layers = of_layers + 1);
    add("model heads", &|o| o.counts.heads = of_heads + 1);
    add("head_dim", &|o| o.counts.head_dim = head_dim + 1);
    add("value_bytes", &|o| o.counts.value_bytes = value_bytes + 1);
    add("page_tokens", &|o| o.counts.page_tokens = page_tokens * 2);
    add("first layer", &|o| o.layers = layers.start + 1..layers.end);
    add("last layer", &|o| o.layers = layers.start..layers.end - 1);
    add("first head", &|o| o.heads = heads.start + 1..heads.end);
    add("last head", &|o| o.heads = heads.start..heads.end - 1);
    add("run", &|o| o.run = run + 1);
    add("turn", &|o| o.turn = turn + 1);
    add("turns", &|o| o.turns = turns + 1);
    add("layout", &|o| o.layout = other_layout);
    all
}

#[test]
fn two_models_that_differ_in_any_one_field_share_nothing() {
    let mut dice = Pcg64Mcg::seed_from_u64(1);
    for _ in 0..500 {
        let base = Described::draw(&mut dice);
        let mut seen: HashMap<Fingerprint, &str> = HashMap::new();
        let all = changed(&base);
        let named = all.iter().map(|(field, other)| (*field, other));
        for (field, described) in named.chain([("none", &base)]) {
            let before = seen.insert(described.namespace().fingerprint(), field);
            assert_eq!(before, None, "changed is {field} of {base:?}");
        }
        assert_eq!(base.namespace(), base.clone().namespace());
    }
}

/// The layers and heads of a rank: one of `tp` x `pp`, which hold the copies of a head if there are
/// more ranks than heads.
fn part_of(model: &Model, [tp, rank]: [u32; 2], [pp, stage]: [u32; 2], sizes: [u32; 2]) -> Model {
    let [layers, heads] = sizes;
    let head = |rank: u32| (rank * heads / tp).min(heads - 1);
    let held = head(rank)..(head(rank) + (heads / tp).max(1));
    let stages = layers / pp;
    let model = model.clone().heads(held).unwrap();
    model.layers(stage * stages..(stage + 1) * stages).unwrap()
}

#[test]
fn ranks_that_hold_the_same_bytes_share_all_and_others_nothing() {
    const SIZES: [u32; 2] = [8, 4];
    let [layers, heads] = SIZES;
    let shape = KvShape::mha(layers, heads, 16, 2, 16).unwrap();
    let model = Model::new("m", "w", "bf16", shape);
    let name = |model: &Model| model.namespace(Layout::PageFirstDirect).unwrap();
    // The ranges that are held, by namespace: of all ranks of all divisions.
    let mut held: HashMap<Fingerprint, HashSet<(u32, u32, u32, u32)>> = HashMap::new();
    let mut parts = HashSet::new();
    for tp in [1, 2, 4, 8, 16] {
        for pp in [1, 2, 4, 8] {
            for (rank, stage) in (0..tp).flat_map(|rank| (0..pp).map(move |stage| (rank, stage))) {
                let part = part_of(&model, [tp, rank], [pp, stage], SIZES);
                let first_head = (rank * heads / tp).min(heads - 1);
                let (stages, width) = (layers / pp, (heads / tp).max(1));
                let range = (stage * stages, stages, first_head, width);
                parts.insert(range);
                held.entry(name(&part).fingerprint())
                    .or_default()
                    .insert(range);
                assert_eq!(part.shape().layers(), stages);
                assert_eq!(part.shape().row_bytes(), width * 16 * 2);
            }
        }
    }
    assert!(held.values().all(|ranges| ranges.len() == 1), "{held:?}");
    assert_eq!(
        held.len(),
        parts.len(),
        "ranks with the same bytes do not share"
    );
    // Without a division: the whole, however it is said.
    let whole = part_of(&model, [1, 0], [1, 0], SIZES);
    let all = model
        .clone()
        .positions(Stripe::new(7, 0, 1).unwrap())
        .unwrap();
    assert_eq!([name(&whole), name(&all)], [name(&model), name(&model)]);
    assert_eq!([whole, all], [model.clone(), model]);
    // Latent rows are the same on all ranks: there is nothing to divide.
    let latent = Model::new("m", "w", "bf16", KvShape::mla(8, 576, 2, 16).unwrap());
    assert_eq!(latent.clone().heads(0..1).unwrap(), latent);
    assert!(latent.heads(0..2).is_err());
}

/// Models whose pages have the same bytes: only the namespace tells them apart.
fn alike() -> Vec<Model> {
    let mha = |layers, heads, dim, bytes| KvShape::mha(layers, heads, dim, bytes, 4).unwrap();
    let new = |shape| Model::new("m", "", "bytes", shape);
    vec![
        new(mha(6, 2, 8, 2)),
        new(mha(6, 4, 4, 2)),
        new(mha(6, 2, 4, 4)),
        new(mha(3, 4, 8, 2)),
        new(mha(12, 1, 8, 2)),
        new(KvShape::of_rows(Attention::Mha, 6, 32, 4).unwrap()),
        new(mha(12, 2, 8, 2)).layers(0..6).unwrap(),
        new(mha(12, 2, 8, 2)).layers(6..12).unwrap(),
        new(mha(6, 4, 8, 2)).heads(0..2).unwrap(),
        new(mha(6, 4, 8, 2)).heads(1..3).unwrap(),
        new(mha(6, 8, 8, 2)).heads(0..2).unwrap(),
    ]
}

#[test]
fn a_store_returns_no_page_of_another_shape_of_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let tokens: Vec<u64> = (0..14).collect();
    for round in 0..2 {
        for (model, mark) in alike().iter().zip(1_u8..) {
            let cache = PrefixCache::open(&path, 128 << 20, model, 20, 20).unwrap();
            let mut sequence = cache.begin(&tokens).unwrap();
            let cached = sequence.cached().l3;
            assert_eq!(cached, [0, 12][round], "model {mark}");
            let layers = model.shape().layers();
            let rows = (0..2).flat_map(|part| (0..layers).map(move |layer| (part, layer)));
            for (part, layer) in rows {
                for position in 0..tokens.len() {
                    if position >= cached {
                        sequence.row_mut(part, layer, position).unwrap().fill(mark);
                    }
                    let row = sequence.row(part, layer, position).unwrap();
                    assert!(row.iter().all(|byte| *byte == mark), "model {mark}");
                }
            }
            sequence.computed(tokens.len()).unwrap();
            sequence.keep().unwrap();
            assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
            cache.close().unwrap();
        }
    }
}

#[test]
fn a_part_that_a_model_does_not_have_is_refused_with_its_range() {
    let shape = KvShape::mha(4, 2, 8, 2, 12).unwrap();
    let model = || Model::new("m", "", "f16", shape);
    for (part, of) in [(2..2, 4), (3..5, 4), (4..5, 4), (0..u32::MAX, 4)] {
        let field = "layers";
        let error = PartError::Range { field, part, of };
        let PartError::Range { part, .. } = error.clone() else {
            unreachable!();
        };
        assert_eq!(model().layers(part), Err(error));
    }
    assert!(model().heads(1..3).is_err());
    for (run, turn, turns) in [(0, 0, 1), (1, 1, 1), (4, 3, 3), (1, 0, 0)] {
        assert_eq!(Stripe::new(run, turn, turns), None);
    }
    for (run, turns, is_whole) in [(1, 2, true), (4, 3, true), (3, 4, true), (4, 2, false)] {
        let striped = model().positions(Stripe::new(run, 1, turns).unwrap());
        assert_eq!(striped.is_ok(), is_whole);
        if let Ok(striped) = striped {
            assert_eq!(striped.shape().page_tokens(), 12 / turns);
            assert_eq!(striped.page_tokens(), 12);
        }
    }
}

/// An encrypted store has a key for each tenant, which it finds by this field.
#[test]
fn tenants_have_namespaces_of_their_own_that_name_them() {
    let model = Described::draw(&mut Pcg64Mcg::seed_from_u64(7)).model();
    let models = [
        model.clone(),
        model.clone().of_tenant("a"),
        model.of_tenant("b"),
    ];
    let namespaces = models.map(|model| model.namespace(Layout::PageFirstDirect).unwrap());
    let tenants = namespaces
        .each_ref()
        .map(|it| it.fields().extra.get("tenant").map(String::as_str));
    assert_eq!(tenants, [None, Some("a"), Some("b")]);
    let fingerprints: HashSet<Fingerprint> =
        namespaces.iter().map(Namespace::fingerprint).collect();
    assert_eq!(fingerprints.len(), 3);
}
