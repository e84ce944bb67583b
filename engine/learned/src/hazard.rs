//! Hazards: how many uses a second pages of a class have at an age, and the index that follows.
//!
//! Ages fall into [`AGES`] steps, three an octave from half a second up. For each class and age
//! there are the uses, and the page-seconds in which they happened. Their quotient is noise for
//! most pairs, so a hazard is drawn towards a product: the hazard of all classes at that age, times
//! a factor for each trait of the class, times a factor for the class. The more uses a pair has,
//! the more it counts for itself. Old uses fade: an hour halves them.

use super::class::{ClassId, Classes, TRAITS, VALUES};

/// Steps of the policy's clock a second: 32 bits last for two years.
pub(super) const TICKS: u32 = 64;

/// Time between two refreshes of the tables.
pub(super) const REFRESH: u32 = 30 * TICKS;

/// Steps of age.
const AGES: usize = 48;

/// Steps an octave.
const STEPS: f64 = 3.0;

/// Lower end of the second step, in seconds.
const FIRST: f64 = 0.5;

/// Uses that the prior counts for: of an age over all classes and of a trait, and of a class.
const PRIOR: f64 = 8.0;
const CLASS_PRIOR: f64 = 16.0;

/// The prior hazard at an age is this share of one over the age: the order of LRU.
const AGE_SHARE: f64 = 0.3;

/// Largest logarithm of a factor of a trait, and of the product of all.
const FACTOR_MAX: f64 = 5.0;
const PRODUCT_MAX: f64 = 8.0;

/// Rounds over all traits, and the part of each step that is taken.
const ROUNDS: usize = 3;
const PACE: f64 = 0.8;

/// Time in which a use counts half.
const HALF_LIFE_SECONDS: f64 = 3600.0;

/// Classes that get a new index at once: about 50 us.
const INDEXED_AT_ONCE: usize = 16;

type ByAge = [f32; AGES];

#[derive(Debug, Clone, Copy)]
struct Row {
    uses: ByAge,
    seconds: ByAge,
    index: ByAge,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Hazards {
    /// Lower ends of the steps, in ticks.
    ends: [u32; AGES],
    /// The step of the least age of so many bits.
    octaves: [u8; u32::BITS as usize + 1],
    rows: Vec<Row>,
    /// The hazard and the index of all classes together.
    pooled: [f64; AGES],
    pooled_index: ByAge,
    /// Logarithms of the factors of the traits.
    factors: [[f64; VALUES]; TRAITS],
    /// By class: the factor of its product, as of the last refresh.
    products: Vec<f64>,
    /// Classes from here on have an old index.
    indexed: usize,
}

/// Lower end of a step in seconds.
fn end(step: usize) -> f64 {
    match step {
        0 => 0.0,
        _ => FIRST * ((step - 1) as f64 / STEPS).exp2(),
    }
}

fn width(step: usize) -> f64 {
    if step + 1 == AGES {
        2.0 * end(step)
    } else {
        end(step + 1) - end(step)
    }
}

fn prior(step: usize) -> f64 {
    AGE_SHARE / (end(step) + 0.3)
}

impl Default for Hazards {
    fn default() -> Hazards {
        let pooled: [f64; AGES] = std::array::from_fn(prior);
        let ends: [u32; AGES] = std::array::from_fn(|step| (end(step) * f64::from(TICKS)) as u32);
        let octaves = std::array::from_fn(|bits| {
            let least = if bits == 0 { 0 } else { 1 << (bits - 1) };
            (ends.partition_point(|end| *end <= least) - 1) as u8
        });
        let mut hazards = Hazards {
            ends,
            octaves,
            rows: Vec::new(),
            pooled,
            pooled_index: index(&pooled),
            factors: [[0.0; VALUES]; TRAITS],
            products: Vec::new(),
            indexed: 0,
        };
        hazards.expect(1);
        hazards.indexed = 1;
        hazards
    }
}

impl Hazards {
    /// Makes room for so many classes. A new one has the index of all together.
    pub(super) fn expect(&mut self, classes: usize) {
        if self.rows.len() == classes {
            return;
        }
        let new = Row {
            uses: [0.0; AGES],
            seconds: [0.0; AGES],
            index: self.pooled_index,
        };
        self.rows.resize(classes, new);
    }

    /// By class and age: uses, and page-seconds.
    pub(super) fn tables(&self) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let rows = self.rows.iter();
        rows.map(|row| (row.uses.to_vec(), row.seconds.to_vec()))
            .unzip()
    }

    /// With such tables of these classes, and the index that follows from them; `None` if there can
    /// be none such.
    pub(super) fn with(
        classes: &Classes,
        uses: Vec<Vec<f32>>,
        seconds: Vec<Vec<f32>>,
    ) -> Option<Hazards> {
        let mut hazards = Hazards::default();
        let number = classes.all().len();
        hazards.expect(number);
        if uses.len() != number || seconds.len() != number {
            return None;
        }
        for (row, (uses, seconds)) in hazards.rows.iter_mut().zip(uses.into_iter().zip(seconds)) {
            row.uses = uses.try_into().ok()?;
            row.seconds = seconds.try_into().ok()?;
            let mut all = row.uses.iter().chain(&row.seconds);
            // No sum of them overflows.
            if !all.all(|number| (0.0..1e30).contains(number)) {
                return None;
            }
        }
        hazards.refresh(classes);
        while hazards.index_some() {}
        Some(hazards)
    }

    #[inline]
    fn step(&self, age: u32) -> usize {
        let octave = age.checked_ilog2().map_or(0, |octave| octave + 1);
        let mut step = usize::from(self.octaves[octave as usize]);
        while let Some(end) = self.ends.get(step + 1)
            && *end <= age
        {
            step += 1;
        }
        step
    }

    /// A page of a class was used at this age.
    pub(super) fn add_use(&mut self, class: ClassId, age: u32) {
        let step = self.step(age);
        self.rows[usize::from(class)].uses[step] += 1.0;
    }

    /// A page of a class went from one age to another.
    pub(super) fn add_time(&mut self, class: ClassId, from: u32, to: u32) {
        let mut from = from;
        let mut step = self.step(from);
        while from < to {
            let end = self.ends.get(step + 1).copied().unwrap_or(u32::MAX).min(to);
            let seconds = f64::from(end - from) / f64::from(TICKS);
            self.rows[usize::from(class)].seconds[step] += seconds as f32;
            from = end;
            step += 1;
        }
    }

    /// The index of a page of a class at an age.
    #[inline]
    pub(super) fn index(&self, class: ClassId, age: u32) -> f32 {
        self.rows[usize::from(class)].index[self.step(age)]
    }

    /// Learns from all that was added. The classes get their new index over the next calls of
    /// [`Hazards::index_some`].
    pub(super) fn refresh(&mut self, classes: &Classes) {
        let sum = |of: fn(&Row) -> &ByAge, step: usize| -> f64 {
            self.rows.iter().map(|row| f64::from(of(row)[step])).sum()
        };
        let half = PRIOR / 2.0;
        for step in 0..AGES {
            let (uses, seconds) = (sum(|row| &row.uses, step), sum(|row| &row.seconds, step));
            self.pooled[step] = (uses + half) / (seconds + half / prior(step));
        }
        self.pooled_index = index(&self.pooled);
        self.fit(classes);
        self.indexed = 0;
    }

    /// Fits the factors of the traits and of the classes.
    fn fit(&mut self, classes: &Classes) {
        // Uses of each class, and the uses that the pooled hazard expects.
        let totals: Vec<(f64, f64)> = self.rows.iter().map(|row| self.total(row)).collect();
        let all = classes.all();
        let mut sums: Vec<f64> = all
            .iter()
            .map(|traits| {
                let values = traits.values().into_iter().zip(&self.factors);
                values
                    .map(|(value, factors)| factors[usize::from(value)])
                    .sum()
            })
            .collect();
        for _ in 0..ROUNDS {
            for at in 0..TRAITS {
                let mut uses = [0.0; VALUES];
                let mut expected = [0.0; VALUES];
                for ((traits, total), sum) in all.iter().zip(&totals).zip(&sums) {
                    let value = usize::from(traits.values()[at]);
                    uses[value] += total.0;
                    expected[value] += total.1 * sum.exp();
                }
                let factors = &mut self.factors[at];
                let mut steps = [0.0; VALUES];
                for value in 0..VALUES {
                    let ratio = (uses[value] + PRIOR) / (expected[value] + PRIOR);
                    let before = factors[value];
                    let wanted = before + PACE * ratio.ln();
                    factors[value] = wanted.clamp(-FACTOR_MAX, FACTOR_MAX);
                    steps[value] = factors[value] - before;
                }
                for (traits, sum) in all.iter().zip(&mut sums) {
                    *sum += steps[usize::from(traits.values()[at])];
                }
            }
        }
        self.products.clear();
        self.products
            .extend(totals.iter().zip(&sums).map(|(total, sum)| {
                let product = sum.clamp(-PRODUCT_MAX, PRODUCT_MAX).exp();
                product * (total.0 + CLASS_PRIOR) / (total.1 * product + CLASS_PRIOR)
            }));
    }

    fn total(&self, row: &Row) -> (f64, f64) {
        let uses = row.uses.iter().copied().map(f64::from).sum();
        let seconds = row.seconds.iter().copied().map(f64::from);
        let expected = seconds
            .zip(&self.pooled)
            .map(|(seconds, hazard)| seconds * hazard);
        (uses, expected.sum())
    }

    /// Gives some classes the index that follows from the last refresh, and lets their uses fade.
    /// Whether there were some.
    #[inline]
    pub(super) fn index_some(&mut self) -> bool {
        self.indexed < self.products.len() && self.index_next()
    }

    fn index_next(&mut self) -> bool {
        let fade = (-f64::from(REFRESH / TICKS) / HALF_LIFE_SECONDS).exp2() as f32;
        let last = self.products.len().min(self.indexed + INDEXED_AT_ONCE);
        let some = self.indexed..last;
        for class in some.clone() {
            let (row, product) = (&self.rows[class], self.products[class]);
            let hazards: [f64; AGES] = std::array::from_fn(|step| {
                let expected = self.pooled[step] * product;
                let (uses, seconds) = (f64::from(row.uses[step]), f64::from(row.seconds[step]));
                (uses + CLASS_PRIOR) / (seconds + CLASS_PRIOR / expected)
            });
            let row = &mut self.rows[class];
            row.index = index(&hazards);
            row.uses.iter_mut().for_each(|uses| *uses *= fade);
            row.seconds.iter_mut().for_each(|seconds| *seconds *= fade);
        }
        self.indexed = last;
        !some.is_empty()
    }

    pub(super) fn ram_bytes(&self) -> usize {
        size_of::<Self>()
            + self.rows.capacity() * size_of::<Row>()
            + self.products.capacity() * size_of::<f64>()
    }
}

/// The Gittins index at each age: the most uses a second over any time from that age on, if the
/// page goes with its first use. Made to fall with age.
fn index(hazards: &[f64; AGES]) -> ByAge {
    // For a page that enters a step: the chance of a use in it, and the time that it expects there.
    let steps: [(f64, f64); AGES] = std::array::from_fn(|step| {
        let (hazard, width) = (hazards[step], width(step));
        let uses = -(-hazard * width).exp_m1();
        (uses, if hazard > 0.0 { uses / hazard } else { width })
    });
    let mut least = f64::INFINITY;
    std::array::from_fn(|from| {
        let (mut stays, mut uses, mut time, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
        for (chance, expected) in &steps[from..] {
            uses += stays * chance;
            time += stays * expected;
            stays *= 1.0 - chance;
            best = best.max(uses / time);
        }
        least = best.min(least);
        least as f32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_falls_with_age_and_sees_uses_that_lie_ahead() {
        let mut hazards = [1e-4; AGES];
        // Nearly all pages are used at this age.
        hazards[20] = 10.0;
        let index = index(&hazards);
        assert!(index.windows(2).all(|pair| pair[0] >= pair[1]));
        assert!(index[21] < index[19] / 10.0, "{index:?}");
    }

    #[test]
    fn a_class_is_ranked_by_its_own_uses_once_it_has_some() {
        let classes = Classes::default();
        let mut hazards = Hazards::default();
        let before = hazards.index(0, 10 * TICKS);
        for _ in 0..1000 {
            hazards.add_time(0, 0, 100 * TICKS);
            hazards.add_use(0, 10 * TICKS);
        }
        hazards.refresh(&classes);
        while hazards.index_some() {}
        assert!(hazards.index(0, 9 * TICKS) > before);
        assert!(hazards.index(0, 90 * TICKS) < before);
    }

    #[test]
    fn time_is_added_to_every_step_that_it_crosses() {
        let mut hazards = Hazards::default();
        hazards.add_time(0, 0, 64 * TICKS);
        let total: f32 = hazards.rows[0].seconds.iter().sum();
        assert!((total - 64.0).abs() < 0.01, "{total}");
        hazards.add_time(0, 32 * TICKS, u32::MAX);
        assert!(hazards.rows[0].seconds[AGES - 1] > 1e6);
    }
}
