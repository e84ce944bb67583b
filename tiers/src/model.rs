//! A model, the part of its KV that a rank holds, and the namespace of that part.
//!
//! Everything that decides the bytes of a page is in the namespace: the names, each count of the
//! shape, the layout, and the layers, heads and positions of the part. The number of ranks and the
//! number of a rank are not: ranks that hold the same bytes share their pages.
//!
//! | rank | its part |
//! |---|---|
//! | pipeline parallel | [`Model::layers`] |
//! | tensor parallel, heads divided | [`Model::heads`] |
//! | tensor parallel, more ranks than KV heads | [`Model::heads`]: the same for copies of a head |
//! | tensor parallel, latent rows (MLA) | the whole: each rank has the same rows |
//! | context parallel, whole pages dealt to ranks | the whole: a page has the same bytes anywhere |
//! | context parallel, the positions of a page dealt to ranks | [`Model::positions`] |
//! | data parallel, expert parallel | the whole |
//!
//! Besides the pages of full attention, a hybrid model has components with pools of their own
//! ([`Component`]). Each of them is a namespace.

use std::ops::Range;

use larder_format::{Namespace, NamespaceError, PageShape, ShapeError, TENANT_FIELD};
use larder_kernels::{Attention, KvCounts, KvShape, Layout};

/// A model, and the part of its KV that this rank holds. Pages of models that are equal here are
/// interchangeable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Its name. Not empty.
    pub name: String,
    /// Distinguishes different weights under the same name. May be empty. The first tag of a
    /// [`PrefixCache`](crate::PrefixCache).
    pub weights: String,
    /// The type of the values in a row. Not empty.
    pub dtype: String,
    /// The page of the whole model.
    whole: KvShape,
    part: Part,
    components: Vec<Component>,
    tenant: Option<String>,
}

/// What the pages of a component are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Bytes beside each page of the model, under its number: an indexer, a draft model, values of
    /// another size than the keys.
    Follower,
    /// The rows of the last `tokens` tokens alone, in pages of a pool of its own.
    Window {
        /// Tokens before a position that it attends to.
        tokens: u32,
    },
    /// One block at a border of pages: the state behind all tokens before it.
    State,
}

/// A part of a hybrid model with bytes of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// Its name. Not empty, and no other component has it.
    pub name: String,
    /// The type of its values. Not empty.
    pub dtype: String,
    /// What its pages are.
    pub role: Role,
    /// The part of it that this rank holds, in any words; empty for the whole. Ranks with equal
    /// words share its pages.
    pub part: String,
    sections: Vec<KvShape>,
}

/// Why a model cannot have a component.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("component {name:?}: {wrong}")]
pub struct ComponentError {
    /// Its name.
    pub name: String,
    /// The problem, and what to do.
    pub wrong: &'static str,
}

impl Component {
    /// A component whose page has one section of each of these shapes, which may differ in size:
    /// of a state the recurrent part and the convolution. Sections of a state have pages of one
    /// token.
    #[must_use]
    pub fn new(name: &str, dtype: &str, role: Role, sections: &[KvShape]) -> Component {
        Component {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
            role,
            part: String::new(),
            sections: sections.to_vec(),
        }
    }

    /// The shapes of its sections.
    #[must_use]
    pub fn sections(&self) -> &[KvShape] {
        &self.sections
    }

    /// Bytes of a page, all sections.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.sections
            .iter()
            .map(|of| u64::from(of.page_bytes()))
            .sum()
    }

    fn check(&self, page_tokens: u32) -> Result<(), ComponentError> {
        let needed = match self.role {
            Role::Follower | Role::Window { .. } => page_tokens,
            Role::State => 1,
        };
        let checks = [
            (!self.name.is_empty(), "it has no name; give one"),
            (!self.sections.is_empty(), "it has no section; give a shape"),
            (
                self.role != Role::Window { tokens: 0 },
                "a window has at least one token",
            ),
            (
                self.sections.iter().all(|of| of.page_tokens() == needed),
                "its sections have other tokens per page than the model, or a state more than one",
            ),
        ];
        match checks.into_iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, wrong)) => Err(ComponentError {
                name: self.name.clone(),
                wrong,
            }),
        }
    }
}

/// What a rank holds. Invariant: no range is empty, and all lie within the whole model.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    layers: Range<u32>,
    heads: Range<u32>,
    positions: Stripe,
}

/// Positions of a context, dealt to ranks by turns: `run` positions each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    run: u32,
    turn: u32,
    turns: u32,
}

impl Stripe {
    /// All positions.
    pub const ALL: Stripe = Stripe {
        run: 1,
        turn: 0,
        turns: 1,
    };

    /// The positions `p` with `p / run % turns == turn`. `None` unless `turn < turns` and `run` is
    /// not 0.
    #[must_use]
    pub const fn new(run: u32, turn: u32, turns: u32) -> Option<Stripe> {
        match (run, turns) {
            // Every run of a single turn is all positions.
            (1.., 1) if turn == 0 => Some(Stripe::ALL),
            (1.., _) if turn < turns => Some(Stripe { run, turn, turns }),
            _ => None,
        }
    }
}

/// Why a rank cannot hold such a part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// The range is empty, or ends behind the last layer or head.
    #[error(
        "{field} {}..{} of {of}: give at least one, and none from {of} on",
        .part.start, .part.end
    )]
    Range {
        /// `layers` or `heads`.
        field: &'static str,
        /// The range.
        part: Range<u32>,
        /// Number of the model.
        of: u32,
    },
    /// The heads of the rank are not whole groups.
    #[error(
        "heads {}..{} of {of} are not whole ones of {groups} groups: give a multiple of the \
         numbers of ranks that divides the heads",
        .heads.start, .heads.end
    )]
    Groups {
        /// Heads of the rank.
        heads: Range<u32>,
        /// Heads of the model.
        of: u32,
        /// Groups of the model.
        groups: u32,
    },
    /// Its positions are not the same number in each page.
    #[error(
        "pages of {page_tokens} tokens are not whole rounds of {turns} turns of {run} positions: \
         give pages of a multiple of their product"
    )]
    Positions {
        /// Tokens of a page.
        page_tokens: u32,
        /// Positions of a turn.
        run: u32,
        /// Turns.
        turns: u32,
    },
}

impl Model {
    /// A model with pages of this shape, all of which this rank holds.
    #[must_use]
    pub fn new(name: &str, weights: &str, dtype: &str, shape: KvShape) -> Model {
        let KvCounts { layers, heads, .. } = shape.counts();
        Model {
            name: name.to_owned(),
            weights: weights.to_owned(),
            dtype: dtype.to_owned(),
            whole: shape,
            part: Part {
                layers: 0..layers,
                heads: 0..heads,
                positions: Stripe::ALL,
            },
            components: Vec::new(),
            tenant: None,
        }
    }

    /// The pages are those of this tenant: an encrypted store has a key for each, which can be
    /// erased. Pages of different tenants are never shared.
    #[must_use]
    pub fn of_tenant(mut self, tenant: &str) -> Model {
        self.tenant = Some(tenant.to_owned());
        self
    }

    /// The model also has this component.
    ///
    /// # Errors
    /// The component has no name or the name of another, or its sections do not fit its role.
    pub fn with(mut self, component: Component) -> Result<Model, ComponentError> {
        component.check(self.page_tokens())?;
        if self.components.iter().any(|of| of.name == component.name) {
            return Err(ComponentError {
                name: component.name,
                wrong: "another component has the name; give each its own",
            });
        }
        self.components.push(component);
        Ok(self)
    }

    /// The components beside the pages of full attention.
    #[must_use]
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// This rank holds these of the model's layers.
    ///
    /// # Errors
    /// The range is empty, or ends behind the last layer.
    pub fn layers(mut self, layers: Range<u32>) -> Result<Model, PartError> {
        self.part.layers = within("layers", layers, self.whole.counts().layers)?;
        Ok(self)
    }

    /// This rank holds these of the model's KV heads.
    ///
    /// # Errors
    /// The range is empty, or ends behind the last head. Latent rows have one head.
    pub fn heads(mut self, heads: Range<u32>) -> Result<Model, PartError> {
        self.part.heads = within("heads", heads, self.whole.counts().heads)?;
        Ok(self)
    }

    /// This rank holds these positions of each page. The caches of this crate have all positions of
    /// a page and refuse such a model; its namespace is for an engine with pools of its own.
    ///
    /// # Errors
    /// A page is not a number of whole rounds.
    pub fn positions(mut self, positions: Stripe) -> Result<Model, PartError> {
        let Stripe { run, turns, .. } = positions;
        let page_tokens = self.whole.page_tokens();
        let round = u64::from(run) * u64::from(turns);
        if !u64::from(page_tokens).is_multiple_of(round) {
            return Err(PartError::Positions {
                page_tokens,
                run,
                turns,
            });
        }
        self.part.positions = positions;
        Ok(self)
    }

    /// The model as a rank would see it that holds one group of heads, for each of the groups that
    /// this rank holds. The model has `groups` groups of equally many heads.
    ///
    /// # Errors
    /// This rank's heads are not whole groups.
    pub fn head_groups(&self, groups: u32) -> Result<Vec<Model>, PartError> {
        let of = self.whole.counts().heads;
        let heads = self.part.heads.clone();
        let each = of.checked_div(groups).filter(|each| each * groups == of);
        let is_whole = |each: &u32| {
            *each > 0 && heads.start.is_multiple_of(*each) && heads.end.is_multiple_of(*each)
        };
        let Some(each) = each.filter(is_whole) else {
            return Err(PartError::Groups { heads, of, groups });
        };
        let firsts = heads.step_by(each as usize);
        firsts
            .map(|first| self.clone().heads(first..first + each))
            .collect()
    }

    /// Tokens that a page covers: all its positions, held by this rank or not.
    #[must_use]
    pub fn page_tokens(&self) -> u32 {
        self.whole.page_tokens()
    }

    /// The layers and heads of this rank.
    pub(crate) fn held(&self) -> (Range<u32>, Range<u32>) {
        (self.part.layers.clone(), self.part.heads.clone())
    }

    /// The pages of full attention of all ranks, under any weights.
    pub(crate) fn whole(&self) -> Model {
        Model::new(&self.name, "", &self.dtype, self.whole)
    }

    /// The pages of this rank.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        let Part {
            layers,
            heads,
            positions,
        } = &self.part;
        self.whole.part(
            layers.end - layers.start,
            heads.end - heads.start,
            self.page_tokens() / positions.turns,
        )
    }

    /// The namespace of this rank's pages, for host pools (L2) of this layout.
    ///
    /// # Errors
    /// A name is not valid, or a page is too large.
    pub fn namespace(&self, layout: Layout) -> Result<Namespace, NamespaceError> {
        let Model {
            name,
            weights,
            dtype,
            whole,
            part,
            components: _,
            tenant,
        } = self;
        let shape = self.shape();
        let page_tokens = whole.page_tokens();
        let mut builder = Namespace::builder(name, weights, page_tokens, page_shape(&shape)?)
            .elements(dtype, stored(layout).name());
        if let Some(tenant) = tenant {
            builder = builder.extra(TENANT_FIELD, tenant);
        }
        for (field, value) in counted(&shape) {
            builder = builder.extra(field, &value);
        }
        let Part {
            layers,
            heads,
            positions,
        } = part;
        // All fields of the shape that a part can cut.
        let KvCounts {
            attention: _,
            layers: of_layers,
            heads: of_heads,
            head_dim: _,
            value_bytes: _,
            page_tokens: _,
        } = whole.counts();
        for (field, part, of) in [
            ("part_of_layers", layers, of_layers),
            ("part_of_heads", heads, of_heads),
        ] {
            if *part != (0..of) {
                let Range { start, end } = part;
                builder = builder.extra(field, &format!("{start}..{end} of {of}"));
            }
        }
        let Stripe { run, turn, turns } = positions;
        if *positions != Stripe::ALL {
            let text = format!("turn {turn} of {turns}, {run} each");
            builder = builder.extra("part_of_positions", &text);
        }
        builder.build()
    }

    /// The namespace of a component's pages, for host pools (L2) of this layout.
    ///
    /// # Errors
    /// A name is not valid, or a page is too large.
    pub fn namespace_of(
        &self,
        component: &Component,
        layout: Layout,
    ) -> Result<Namespace, NamespaceError> {
        let shape = page_shape_of(&component.sections)?;
        let role = match component.role {
            Role::Follower => "follower".to_owned(),
            Role::Window { tokens } => format!("window of {tokens} tokens"),
            Role::State => "state".to_owned(),
        };
        let mut builder = Namespace::builder(&self.name, &self.weights, self.page_tokens(), shape)
            .elements(&component.dtype, stored(layout).name())
            .pool(&component.name)
            .extra("role", &role);
        if let Some(tenant) = &self.tenant {
            builder = builder.extra(TENANT_FIELD, tenant);
        }
        for (number, section) in component.sections.iter().enumerate() {
            let counts = counted(section).map(|(field, value)| format!("{field} {value}"));
            builder = builder.extra(&format!("section_{number}"), &counts.join(", "));
        }
        if !component.part.is_empty() {
            builder = builder.extra("part", &component.part);
        }
        builder.build()
    }
}

fn within(field: &'static str, part: Range<u32>, of: u32) -> Result<Range<u32>, PartError> {
    if part.is_empty() || part.end > of {
        return Err(PartError::Range { field, part, of });
    }
    Ok(part)
}

/// The parts of a page of this shape as an L3 stores them, in every layout: K, then V; or the
/// latent rows.
///
/// # Errors
/// A part is too large for a store.
pub fn page_shape(shape: &KvShape) -> Result<PageShape, ShapeError> {
    page_shape_of(&[*shape])
}

/// The parts of a page of these sections, one section after the other.
///
/// # Errors
/// A part is too large for a store.
pub fn page_shape_of(sections: &[KvShape]) -> Result<PageShape, ShapeError> {
    let parts = |of: &KvShape| vec![of.part_bytes(); of.parts() as usize];
    PageShape::new(&sections.iter().flat_map(parts).collect::<Vec<u32>>())
}

/// The order in which an L3 stores the rows of a host pool's pages.
pub(crate) fn stored(layout: Layout) -> Layout {
    match layout {
        Layout::LayerFirst | Layout::PageFirstDirect => Layout::PageFirstDirect,
        Layout::PageFirst => Layout::PageFirst,
        Layout::PageHead => Layout::PageHead,
    }
}

/// The counts of a pool's pages that a namespace has as further fields, by name.
pub(crate) fn counted(shape: &KvShape) -> [(&'static str, String); 5] {
    let KvCounts {
        attention,
        layers,
        heads,
        head_dim,
        value_bytes,
        // A field that every namespace has.
        page_tokens: _,
    } = shape.counts();
    let attention = match attention {
        Attention::Mha => "mha",
        Attention::Mla => "mla",
    };
    [
        ("attention", attention.to_owned()),
        ("layers", layers.to_string()),
        ("heads", heads.to_string()),
        ("head_dim", head_dim.to_string()),
        ("value_bytes", value_bytes.to_string()),
    ]
}
