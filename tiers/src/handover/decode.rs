//! Requests that a decode process takes.

use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::runtime::after;
use larder_base::system::sockets::UnixStream;
use larder_sync::{Condvar, Mutex, MutexGuard};

use super::copies::{Copies, Link, Span, Terms};
use super::error::{HandoverError, garbled};
use super::memory::Memory;
use super::wire::{Lent, MAGIC, Take, ToPrefill, VERSION};
use super::{State, start};
use crate::planted::planted;
use crate::prefix::{Ask, Begin, BeginError, Filling, Lender, PrefixCache, Sequence};

/// The first pause between two looks for pages and room, and the longest one.
const LOOK_AGAIN: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(10)];

/// The end of a decode process. It maps the memory of the prefill process when it takes the first
/// request.
pub struct Decode {
    socket: PathBuf,
    cache: Lender,
    memory: Arc<Mapped>,
}

/// The memory of the prefill process, with its name.
#[derive(Default)]
struct Mapped(Mutex<Option<(u64, Arc<Memory>)>>);

/// A request that was handed over.
pub struct Taken {
    /// The sequence, with room for the reserved tokens. Rows that are still being copied are behind
    /// its tickets. If their copy fails, it is broken.
    pub sequence: Sequence,
    /// Its rows up to here are there, or behind tickets. If the store did not have all pages in
    /// time, fewer than the sequence has tokens: compute the others.
    pub computed: usize,
    /// The token behind those of the sequence, which is not pushed.
    pub token: u64,
    /// The data of the engine.
    pub data: Vec<u8>,
}

/// A request that is being taken. A drop cancels it.
#[must_use = "a dropped request is cancelled"]
pub struct Taking(Arc<Slot>);

/// Where the thread of a request leaves it.
struct Slot {
    state: Mutex<SlotState>,
    changed: Condvar,
    stop: Arc<Stop>,
}

struct SlotState {
    state: State,
    /// Once, after [`State::Success`].
    taken: Option<Taken>,
}

/// Ends the thread of a request.
#[derive(Default)]
struct Stop(Mutex<(bool, Option<Arc<UnixStream>>)>);

impl Stop {
    fn stop(&self) {
        let mut stop = self.0.lock();
        stop.0 = true;
        if let Some(stream) = stop.1.take() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// The thread waits for this stream from now on.
    fn watch(&self, stream: Arc<UnixStream>) -> Result<(), HandoverError> {
        let mut stop = self.0.lock();
        stop.1 = Some(stream);
        match stop.0 {
            true => Err(HandoverError::Cancelled),
            false => Ok(()),
        }
    }

    fn is_stopped(&self) -> bool {
        self.0.lock().0
    }
}

impl Decode {
    /// A decode process with this cache, that takes requests from the prefill process at a socket.
    ///
    /// # Errors
    /// The cache has ranks or components.
    pub fn new(socket: &Path, cache: &PrefixCache) -> Result<Decode, HandoverError> {
        let cache = cache.lender();
        match cache.unsupported() {
            Some(what) => Err(HandoverError::Unsupported { what }),
            None => Ok(Decode {
                socket: socket.to_owned(),
                cache,
                memory: Arc::default(),
            }),
        }
    }

    /// Takes a request that the prefill process offers under this name, or will offer. `ask` has
    /// its tokens, with the extra key and the salt; and room for the answer. Does not wait: a
    /// thread connects, begins the sequence, and copies the rows while they are computed.
    ///
    /// The thread looks for pages that go through the store for at most `patience`, and everything
    /// ends within `timeout`.
    ///
    /// # Errors
    /// The thread cannot be started, or the cache is closed.
    pub fn take(
        &self,
        id: &str,
        ask: &Ask<'_>,
        patience: Duration,
        timeout: Duration,
    ) -> Result<Taking, HandoverError> {
        let what = "a prompt with tokens that cannot be numbered";
        let prompt = self.cache.digest(ask)?;
        let prompt = prompt.ok_or(HandoverError::Unsupported { what })?;
        let slot = Arc::new(Slot {
            state: Mutex::new(SlotState {
                state: State::Waiting,
                taken: None,
            }),
            changed: Condvar::new(),
            stop: Arc::default(),
        });
        let request = Request {
            id: id.to_owned(),
            prompt: *prompt.as_bytes(),
            tokens: ask.tokens().to_vec(),
            ask: ask.with_tokens(&[]),
            patience,
            timeout,
            socket: self.socket.clone(),
            cache: self.cache.clone(),
            memory: self.memory.clone(),
            slot: slot.clone(),
        };
        let failed = |error: std::io::Error| HandoverError::Socket {
            what: "a thread for",
            path: self.socket.display().to_string(),
            why: error.to_string(),
        };
        start("larder-decode", move || {
            let slot = request.slot.clone();
            if let Err(error) = request.run() {
                slot.fail(error);
            }
        })
        .map_err(failed)?;
        Ok(Taking(slot))
    }
}

impl Taking {
    /// Where it is. Does not wait.
    #[must_use]
    pub fn state(&self) -> State {
        self.0.state.lock().state.clone()
    }

    /// The request, when the token has come. Does not wait.
    ///
    /// # Errors
    /// Why the hand-over has failed.
    pub fn poll(&mut self) -> Result<Option<Taken>, HandoverError> {
        let mut state = self.0.state.lock();
        match &state.state {
            State::Failed(error) => Err(error.clone()),
            _ => Ok(state.taken.take()),
        }
    }

    /// Waits for the request, at most until the end of its time.
    ///
    /// # Errors
    /// Why the hand-over has failed.
    pub fn wait(self) -> Result<Taken, HandoverError> {
        let mut state = self.0.state.lock();
        loop {
            match (&state.state, state.taken.is_some()) {
                (State::Failed(error), _) => return Err(error.clone()),
                (State::Success, false) => return Err(HandoverError::Cancelled),
                _ => {}
            }
            if let Some(taken) = state.taken.take() {
                return Ok(taken);
            }
            self.0.changed.wait(&mut state);
        }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        // The thread goes on for a sequence that was taken.
        let is_taken = state.state == State::Success && state.taken.is_none();
        let left = state.taken.take();
        if !is_taken {
            // Under the lock: the thread leaves nothing here from now on.
            self.0.stop.stop();
        }
        drop(state);
        drop(left);
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock()
    }

    fn transfers(&self) {
        self.lock().state = State::Transferring;
    }

    fn fail(&self, error: HandoverError) {
        let mut state = self.lock();
        if state.state != State::Success {
            state.state = State::Failed(error);
            self.changed.notify_all();
        }
    }

    /// Leaves the request for the engine, which may have gone.
    fn give(&self, taken: Taken) -> Result<(), HandoverError> {
        let mut state = self.lock();
        if self.stop.is_stopped() {
            drop(state);
            drop(taken);
            return Err(HandoverError::Cancelled);
        }
        (state.state, state.taken) = (State::Success, Some(taken));
        self.changed.notify_all();
        Ok(())
    }
}

/// A request in its thread.
struct Request {
    id: String,
    prompt: [u8; 32],
    tokens: Vec<u64>,
    ask: Ask<'static>,
    patience: Duration,
    timeout: Duration,
    socket: PathBuf,
    cache: Lender,
    memory: Arc<Mapped>,
    slot: Arc<Slot>,
}

impl Request {
    fn run(&self) -> Result<(), HandoverError> {
        let terms = Terms {
            id: &self.id,
            timeout: self.timeout,
            until: after(self.timeout),
        };
        let shape = *self.cache.shape();
        let mut link = Link::connect(&self.socket, shape.layers(), &terms)?;
        self.slot.stop.watch(link.stream())?;
        link.send(&ToPrefill::Take(Take {
            magic: MAGIC,
            version: VERSION,
            id: self.id.clone(),
            namespace: self.cache.namespace(),
            prompt: self.prompt,
            memory: self.memory.name(),
        }))?;
        let (lent, file) = link.lent()?;
        self.slot.transfers();
        let memory = self.memory.of(&lent, file, &self.cache)?;
        let mut sequence = self.begin(&mut link, &terms, lent.from as usize)?;
        let have = sequence.cached().tokens();
        if have < lent.from as usize && !planted!(SkipsMissingPages) {
            // The rows are of no use without those before them.
            let (token, data) = link.end()?;
            link.send(&ToPrefill::Returned)?;
            return self.slot.give(Taken {
                sequence,
                computed: have,
                token,
                data,
            });
        }
        let span = Span {
            from: have.max(lent.from as usize),
            tokens: sequence.len(),
            page_tokens: shape.page_tokens() as usize,
            layer_bytes: (shape.parts() * shape.row_bytes()) as usize,
        };
        let (mut copies, tickets) = Copies::new(
            &memory,
            &lent,
            &span,
            shape.layers(),
            self.cache.forwards()?,
        );
        // Not the slot, which may hold the sequence.
        let stop = self.slot.stop.clone();
        // Dropped before the promises of `copies`.
        let filling = sequence.fill(span.tokens, tickets, move || stop.stop())?;
        self.copy(&terms, &mut link, &mut copies, filling, sequence)
    }

    /// Begins the sequence. Waits until the tiers have its tokens before `from`, or the patience is
    /// over; and for room in L1.
    fn begin(
        &self,
        link: &mut Link<'_>,
        terms: &Terms<'_>,
        from: usize,
    ) -> Result<Sequence, HandoverError> {
        let patience = after(self.patience).min(terms.until);
        let (mut pause, mut asked) = (LOOK_AGAIN[0], None);
        loop {
            if self.slot.stop.is_stopped() {
                return Err(HandoverError::Cancelled);
            }
            let waiting = match asked.take() {
                Some(waiting) => waiting,
                None => self.cache.ask(&self.ask.with_tokens(&self.tokens))?,
            };
            // Without a wait for pages that come through the memory, too.
            let has_enough = waiting.cached()?.tokens() >= from;
            let is_over = has_enough || Instant::now() >= patience;
            let begun = match is_over {
                // It begins with the pages that have arrived.
                true => waiting.begin_within(Duration::ZERO).map(Begin::Ready),
                false => waiting.try_begin(),
            };
            match begun {
                Ok(Begin::Ready(sequence)) => {
                    if is_over || sequence.cached().tokens() >= from {
                        return Ok(sequence);
                    }
                }
                Ok(Begin::Later(waiting)) => asked = Some(waiting),
                Err(BeginError::NoRoom { .. }) if Instant::now() < terms.until => {}
                Err(error) => return Err(error.into()),
            }
            let until = terms.until.min(Instant::now() + pause);
            while Instant::now() < until && !self.slot.stop.is_stopped() {
                link.wait(until)?;
            }
            pause = LOOK_AGAIN[1].min(pause * 2);
        }
    }

    /// Copies rows as they come. Gives the sequence away with the token, and copies the other rows.
    fn copy(
        &self,
        terms: &Terms<'_>,
        link: &mut Link<'_>,
        copies: &mut Copies<'_>,
        filling: Filling,
        sequence: Sequence,
    ) -> Result<(), HandoverError> {
        let (mut sequence, mut filling) = (Some(sequence), Some(filling));
        let computed = self.tokens.len();
        loop {
            link.absorb()?;
            if link.has_end()
                && copies.has_tickets()
                && let Some((token, data)) = link.take_end()
                && let Some(mut sequence) = sequence.take()
            {
                copies.give(&mut sequence);
                self.slot.give(Taken {
                    sequence,
                    computed,
                    token,
                    data,
                })?;
            }
            let has_copied = match &filling {
                Some(filling) => copies.copy(link, filling)?,
                None => false,
            };
            if copies.are_over()? {
                // The copies are over for the sequence, whatever happens to the connection.
                let _is_left = filling.take().map(Filling::complete);
                copies.settle();
                if sequence.is_none() {
                    return link.send(&ToPrefill::Returned);
                }
            }
            if has_copied {
                continue;
            }
            if Instant::now() >= terms.until {
                return Err(HandoverError::Late {
                    what: "all rows and the first token",
                    timeout: terms.timeout,
                });
            }
            let pause = copies.pause().map(|pause| Instant::now() + pause);
            link.wait(pause.unwrap_or(terms.until))?;
        }
    }
}

impl Mapped {
    fn name(&self) -> Option<u64> {
        self.0.lock().as_ref().map(|(name, _)| *name)
    }

    /// The memory of a loan.
    fn of(
        &self,
        lent: &Lent,
        file: Option<std::os::fd::OwnedFd>,
        cache: &Lender,
    ) -> Result<Arc<Memory>, HandoverError> {
        let mut mapped = self.0.lock();
        if let Some((name, memory)) = &*mapped
            && *name == lent.memory
        {
            return Ok(memory.clone());
        }
        let file = file.ok_or_else(|| garbled("a loan without memory".to_owned()))?;
        let shape = cache.shape();
        let failed = |why| HandoverError::Memory {
            bytes: u64::from(lent.blocks) * u64::from(shape.page_bytes()),
            why,
        };
        let memory = Memory::adopt(file, lent.blocks, shape);
        let memory = memory.map_err(|error| failed(error.to_string()))?;
        let memory = memory.registered(cache.device()?, shape);
        let memory = Arc::new(memory.map_err(|error| failed(error.to_string()))?);
        *mapped = Some((lent.memory, memory.clone()));
        Ok(memory)
    }
}
