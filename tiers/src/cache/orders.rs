//! The execution of the core's orders: copies by the device, work for the threads of L3.

use larder_format::PageKey;
use larder_kernels::{
    DeviceError, Direction, Gated, L2Pool, LayerTickets, PagePair, Ticket, Transfer,
};

use super::Cache;
use super::agree::{Line, Work as Awaited};
use super::lent::LentPages;
use super::pools::{Copy, Plan, Section};
use super::workers::{Answer, Work};
use crate::core::{Done, Fence, OpId, Order, Outcome, TailPage, TailPair};
use crate::runs::{L1, L2, Run, Runs};
use crate::tails::Legal;
use crate::tree::LoadId;

impl Cache {
    /// Passes the core's orders to the device and the threads. No order of a pass depends on
    /// another. Backups come last, as one copy: a request waits for its load, and nothing for them.
    pub(super) fn carry_out(&mut self) {
        let (mut backups, mut stored) = (Vec::new(), Vec::new());
        let orders: Vec<Order> = std::iter::from_fn(|| self.core.next_order()).collect();
        for order in orders.iter().filter(|order| order.is_answered()) {
            self.time.begun(order);
        }
        for order in orders {
            match order {
                Order::BackUp { id, l1, l2, .. } => {
                    backups.push(id);
                    stored.extend(pairs(&l1, &l2));
                }
                Order::BackUpTails { id, pairs } => {
                    let plan = plan_of(&self.tails, &pairs);
                    self.back_up(vec![id], plan);
                }
                Order::Load {
                    id,
                    l2,
                    l1,
                    tails,
                    after,
                } => self.load(id, pairs(&l1, &l2), &tails, after),
                order => self.ask_l3(order),
            }
        }
        if !backups.is_empty() {
            let plan = self.plan_of_pages(stored);
            self.back_up(backups, plan);
        }
    }

    /// The copies of these pages of the model and its followers.
    fn plan_of_pages(&self, pairs: Vec<PagePair>) -> Plan {
        let sections: Vec<&Section> = match pairs.is_empty() {
            true => Vec::new(),
            false => self.main.iter().flatten().collect(),
        };
        let pairs = std::iter::repeat_n(pairs, sections.len());
        sections.into_iter().cloned().zip(pairs).collect()
    }

    fn back_up(&mut self, ids: Vec<OpId>, plan: Plan) {
        for id in &ids {
            self.agreed.expect(Line::BackUp, Awaited::Order(*id));
        }
        // The core orders a backup after the forwards of its pages have ended.
        let (copy, _refusal) = self.begin(ids, plan, &Ticket::done(), Direction::Store);
        self.copies.push(copy);
    }

    fn load(&mut self, id: OpId, pairs: Vec<PagePair>, tails: &[TailPair], after: Fence) {
        self.agreed.expect(Line::Load, Awaited::Order(id));
        let after = self.forwards.over_until(after);
        let mut plan = self.plan_of_pages(pairs);
        plan.extend(plan_of(&self.tails, tails));
        let (copy, refusal) = self.begin(vec![id], plan, &after, Direction::Load);
        let gates = match refusal {
            None => gates(&copy.transfers),
            Some(error) => vec![failed(error)],
        };
        self.loads.insert(LoadId(id.0), gates);
        self.copies.push(copy);
    }

    /// Begins the copies of some orders. After one that is refused, which it returns, no other is
    /// begun.
    fn begin(
        &self,
        ids: Vec<OpId>,
        plan: Plan,
        after: &Ticket,
        direction: Direction,
    ) -> (Copy, Option<DeviceError>) {
        let (mut transfers, mut refusal) = (Vec::new(), None);
        for (Section { l1, l2 }, pairs) in plan {
            // SAFETY: the core holds every page of an order until the order is completed, which
            // happens only after the transfers have been returned. Until then the core neither
            // hands out nor writes these pages. Pages of a backup were written by forwards that
            // have ended. A load begins when every forward that may still use its L1 pages is
            // over, and rows contain those pages only behind the tickets of the load.
            let transfer = unsafe { Transfer::new(&l1, &l2, pairs) };
            let begun = transfer.and_then(|transfer| {
                let begun = match direction {
                    Direction::Load => self.device.load(transfer, after),
                    Direction::Store => self.device.store(transfer, after),
                };
                begun.map_err(|refused| refused.error)
            });
            match begun {
                Ok(transfer) => transfers.push(transfer),
                Err(error) => {
                    tracing::warn!("the device refused a copy between L1 and L2: {error}");
                    refusal = Some(error);
                    break;
                }
            }
        }
        let copy = Copy {
            ids,
            after: after.clone(),
            is_good: refusal.is_none(),
            transfers,
        };
        (copy, refusal)
    }

    fn touch(&self, keys: Vec<PageKey>, pool: Option<usize>) {
        if let Some(workers) = &self.workers {
            workers.give(Work::Touch { keys, pool });
        }
    }

    fn ask_l3(&mut self, order: Order) {
        // Each rank has a set for a lookup, also without an answer.
        let mut legal = None;
        let (line, id, work) = match order {
            Order::Touch { keys } => return self.touch(keys, None),
            Order::TouchTails { pool, keys } => return self.touch(keys, Some(pool)),
            Order::Exists {
                id,
                keys,
                is_counted,
                tails,
            } => {
                legal = tails.is_some().then(Legal::default);
                let work = Work::Exists {
                    id,
                    keys,
                    is_counted,
                    tails,
                };
                (Line::Prefetch, id, Ok(work))
            }
            Order::Get { id, keys, l2 } => {
                self.reads.insert(id, keys.len());
                (
                    Line::Prefetch,
                    id,
                    self.lend(&l2).map(|into| Work::Get { id, keys, into }),
                )
            }
            Order::GetTails { id, pages } => {
                let lend = |page: TailPage| {
                    let into = self.lend_tail(&page)?;
                    Ok((page.pool, page.key, into))
                };
                let pages: Result<Vec<_>, DeviceError> = pages.into_iter().map(lend).collect();
                let work = pages.map(|pages| Work::GetTails { id, pages });
                (Line::Prefetch, id, work)
            }
            Order::PutTail { id, page } => {
                let (pool, key) = (page.pool, page.key);
                let from = self.lend_tail(&page);
                let put = |from| Work::PutTail {
                    id,
                    pool,
                    key,
                    from,
                };
                (Line::Put, id, from.map(put))
            }
            Order::Put {
                id,
                keys,
                is_skipped: true,
                ..
            } => {
                self.agreed.expect(Line::Put, Awaited::Order(id));
                let outcome = Outcome::Pages(keys.len());
                return self.ended.push(Answer::of(Done { id, outcome }));
            }
            Order::Put {
                id,
                keys,
                parent,
                depth,
                l2,
                ..
            } => {
                let put = |from| Work::Put {
                    id,
                    keys,
                    parent,
                    depth,
                    from,
                };
                (Line::Put, id, self.lend(&l2).map(put))
            }
            Order::BackUp { .. } | Order::BackUpTails { .. } | Order::Load { .. } => return,
        };
        self.agreed.expect(line, Awaited::Order(id));
        let nothing = Done {
            id,
            outcome: Outcome::Pages(0),
        };
        let refused = match (&self.workers, work) {
            (Some(workers), Ok(work)) => workers.give(work),
            _ => Some(nothing),
        };
        self.ended.extend(refused.map(|done| Answer {
            legal,
            ..Answer::of(done)
        }));
    }

    /// The pages of an order, of the model and of each follower.
    fn lend(&self, pages: &Runs<L2>) -> Result<Vec<LentPages>, DeviceError> {
        let components = self.main.iter();
        components
            // SAFETY: as for transfers: the pages belong to the order until its answer is
            // processed.
            .map(|sections| unsafe { LentPages::new(host_pools(sections), pages) })
            .collect()
    }

    fn lend_tail(&self, page: &TailPage) -> Result<LentPages, DeviceError> {
        let sections = self.tails.get(page.pool).map_or(&[][..], Vec::as_slice);
        let run = Runs::from(Run::new(page.l2, 1));
        // SAFETY: as above.
        unsafe { LentPages::new(host_pools(sections), &run) }
    }
}

fn host_pools(sections: &[Section]) -> Vec<L2Pool> {
    sections.iter().map(|section| section.l2.clone()).collect()
}

/// The copies of these pages of tail pools.
fn plan_of(tails: &[Vec<Section>], pairs: &[TailPair]) -> Plan {
    let mut plan = Plan::new();
    for (number, sections) in tails.iter().enumerate() {
        let own = pairs.iter().filter(|pair| pair.pool == number);
        let own: Vec<PagePair> = own
            .map(|pair| PagePair {
                l1: pair.l1,
                l2: pair.l2,
            })
            .collect();
        if !own.is_empty() {
            plan.extend(sections.iter().map(|of| (of.clone(), own.clone())));
        }
    }
    plan
}

/// The tickets of a load: those of the first transfer by layer; each of the others guards all
/// layers.
fn gates(transfers: &[Gated<Transfer>]) -> Vec<LayerTickets> {
    let mut all = Vec::new();
    for (number, transfer) in transfers.iter().enumerate() {
        for gate in transfer.gates() {
            if number == 0 {
                all.push(gate.clone());
            } else {
                all.extend(gate.tickets().map(LayerTickets::whole));
            }
        }
    }
    all
}

fn failed(error: DeviceError) -> LayerTickets {
    LayerTickets::whole(Ticket::failed(error))
}

fn pairs(l1: &Runs<L1>, l2: &Runs<L2>) -> Vec<PagePair> {
    let both = l1.page_numbers().zip(l2.page_numbers());
    both.map(|(l1, l2)| PagePair { l1, l2 }).collect()
}
