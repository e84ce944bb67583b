//! The execution of the core's orders: copies by the device, work for the threads of L3.

use larder_kernels::{DeviceError, Gated, LayerTickets, PagePair, Ticket, Transfer};

use super::agree::{Line, Work as Awaited};
use super::lent::LentPages;
use super::workers::Work;
use super::{Cache, Copy};
use crate::core::{Done, Fence, OpId, Order, Outcome};
use crate::runs::{L1, L2, Runs};
use crate::tree::LoadId;

impl Cache {
    /// Passes the core's orders to the device and the threads. No order of a pass depends on
    /// another. Backups come last, as one copy: a request waits for its load, and nothing for them.
    pub(super) fn carry_out(&mut self) {
        let (mut backups, mut stored) = (Vec::new(), Vec::new());
        let orders: Vec<Order> = std::iter::from_fn(|| self.core.next_order()).collect();
        let answered = |order: &&Order| !matches!(order, Order::Touch { .. });
        for order in orders.iter().filter(answered) {
            self.time.begun(order);
        }
        for order in orders {
            match order {
                Order::BackUp { id, l1, l2, .. } => {
                    backups.push(id);
                    stored.extend(pairs(&l1, &l2));
                }
                Order::Load { id, l2, l1, after } => self.load(id, pairs(&l1, &l2), after),
                order => self.ask_l3(order),
            }
        }
        if !backups.is_empty() {
            self.back_up(backups, stored);
        }
    }

    fn back_up(&mut self, ids: Vec<OpId>, pairs: Vec<PagePair>) {
        for id in &ids {
            self.agreed.expect(Line::BackUp, Awaited::Order(*id));
        }
        // The core orders a backup after the forwards of its pages have ended.
        let stored = self.transfer(pairs).and_then(|transfer| {
            self.device
                .store(transfer, &Ticket::done())
                .map_err(|refused| refused.error)
        });
        self.copy_begun(ids, Ticket::done(), stored);
    }

    fn load(&mut self, id: OpId, pairs: Vec<PagePair>, after: Fence) {
        self.agreed.expect(Line::Load, Awaited::Order(id));
        let after = self.forwards.over_until(after);
        let loaded = self.transfer(pairs).and_then(|transfer| {
            self.device
                .load(transfer, &after)
                .map_err(|refused| refused.error)
        });
        let gates = match &loaded {
            Ok(transfer) => transfer.gates().to_vec(),
            Err(error) => vec![failed(error)],
        };
        self.loads.insert(LoadId(id.0), gates);
        self.copy_begun(vec![id], after, loaded);
    }

    fn transfer(&self, pairs: Vec<PagePair>) -> Result<Transfer, DeviceError> {
        // SAFETY: the core holds every page of an order until the order is completed, which happens
        // only after the transfer has been returned. Until then the core neither hands out nor
        // writes these pages. Pages of a backup were written by forwards that have ended. A load
        // begins when every forward that may still use its L1 pages is over, and rows contain those
        // pages only behind the tickets of the load.
        unsafe { Transfer::new(&self.l1, &self.l2, pairs) }
    }

    fn copy_begun(
        &mut self,
        ids: Vec<OpId>,
        after: Ticket,
        begun: Result<Gated<Transfer>, DeviceError>,
    ) {
        match begun {
            Ok(transfer) => self.copies.push(Copy {
                ids,
                after,
                transfer,
            }),
            Err(error) => {
                tracing::warn!("the device refused a copy between L1 and L2: {error}");
                let outcome = Outcome::Copied(false);
                let dones = ids.into_iter().map(|id| Done { id, outcome });
                self.ended.extend(dones.map(|done| (done, None)));
            }
        }
    }

    fn ask_l3(&mut self, order: Order) {
        let (line, id, work) = match order {
            Order::Touch { keys } => {
                if let Some(workers) = &self.workers {
                    workers.give(Work::Touch { keys });
                }
                return;
            }
            Order::Exists {
                id,
                keys,
                is_counted,
            } => {
                let work = Work::Exists {
                    id,
                    keys,
                    is_counted,
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
            Order::Put {
                id,
                keys,
                is_skipped: true,
                ..
            } => {
                self.agreed.expect(Line::Put, Awaited::Order(id));
                let outcome = Outcome::Pages(keys.len());
                return self.ended.push((Done { id, outcome }, None));
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
            Order::BackUp { .. } | Order::Load { .. } => return,
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
        self.ended.extend(refused.map(|done| (done, None)));
    }

    fn lend(&self, pages: &Runs<L2>) -> Result<LentPages, DeviceError> {
        // SAFETY: as for transfers: the pages belong to the order until its answer is processed.
        unsafe { LentPages::new(&self.l2, pages) }
    }
}

fn failed(error: &DeviceError) -> LayerTickets {
    let (promise, ticket) = Ticket::promised();
    promise.settle(Err(error.clone()));
    LayerTickets::whole(ticket)
}

fn pairs(l1: &Runs<L1>, l2: &Runs<L2>) -> Vec<PagePair> {
    let both = l1.page_numbers().zip(l2.page_numbers());
    both.map(|(l1, l2)| PagePair { l1, l2 }).collect()
}
