//! A disk in front of the real disk: rules make operations fail, get lost, go elsewhere or wait.
//! All other operations pass.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use larder_disk::{Action, Choice, Disk, DiskError, Done, Op, Piece};
use larder_engine::{OpenOptions, Store};
use larder_store::api::DiskWrapper;

use super::Home;
use super::honest::PATIENCE;

/// An operation, as a rule sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    Read { offset: u64, bytes: usize },
    Write { offset: u64, bytes: usize },
    Sync,
}

/// The effect of a rule on an operation.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Answered with this error, and not executed.
    Fails(i32),
    /// Answered as done, and not executed.
    IsLost,
    /// Executed at this offset instead.
    GoesTo(u64),
    /// Neither executed nor answered before it is released.
    IsHeld,
    /// Never executed or answered, as if queued for ever.
    Waits,
    /// Answered with this error, and every second write since the last good sync is undone.
    Drops(i32),
}

struct Rule {
    names: Box<dyn Fn(usize, Seen) -> bool + Send>,
    fault: Fault,
    times: usize,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    held: Vec<Op>,
    waiting: Vec<Op>,
    hits: usize,
    /// How often operations past their deadline were asked for.
    expirations: usize,
    /// The bytes before each write since the last good sync.
    before: Vec<(u64, Vec<u8>)>,
}

pub struct Faulty {
    inner: Arc<dyn Disk>,
    /// The first volume, for reading and undoing writes to it.
    file: std::fs::File,
    state: Mutex<State>,
    changed: Condvar,
}

/// The last disk that a wrapper made.
pub type Made = Arc<Mutex<Option<Arc<Faulty>>>>;

/// A wrapper that makes disks with rules for faults, each prepared by `prepare`.
pub fn faulty(
    home: &Home,
    prepare: impl Fn(&Faulty) + Send + Sync + 'static,
) -> (DiskWrapper, Made) {
    let (made, path) = (Made::default(), home.path.clone());
    let wrapper = DiskWrapper::new({
        let made = made.clone();
        move |disk| {
            let disk = Faulty::new(disk, &path);
            prepare(&disk);
            *made.lock().unwrap() = Some(disk.clone());
            disk
        }
    });
    (wrapper, made)
}

/// Opens a store over a disk with rules for faults.
pub fn open_faulty(home: &Home, options: OpenOptions) -> (Store, Arc<Faulty>) {
    open_prepared(home, options, |_| ())
}

/// The same, with a disk that is prepared before its first operation.
pub fn open_prepared(
    home: &Home,
    options: OpenOptions,
    prepare: impl Fn(&Faulty) + Send + Sync + 'static,
) -> (Store, Arc<Faulty>) {
    let (wrapper, made) = faulty(home, prepare);
    let store = home.open_with(options.with(|o| o.disk_wrapper = Some(wrapper)));
    let disk = made.lock().unwrap().clone();
    (store, disk.unwrap())
}

fn seen(action: &Action) -> Seen {
    match action {
        Action::Read { offset, buffer } => Seen::Read {
            offset: *offset,
            bytes: buffer.len(),
        },
        Action::Write { offset, buffer } => Seen::Write {
            offset: *offset,
            bytes: buffer.len(),
        },
        Action::Sync => Seen::Sync,
    }
}

fn answer(op: Op, result: Result<(), DiskError>) {
    let buffer = match op.action {
        Action::Read { buffer, .. } | Action::Write { buffer, .. } => buffer.into_owned(),
        Action::Sync => None,
    };
    op.sink.done(vec![Done {
        tag: op.tag,
        result,
        buffer,
    }]);
}

impl Faulty {
    pub fn new(inner: Arc<dyn Disk>, path: &Path) -> Arc<Faulty> {
        let file = std::fs::File::options().read(true).write(true).open(path);
        Arc::new(Faulty {
            inner,
            file: file.unwrap(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Applies `fault` to the next `times` operations that `names` accepts.
    pub fn when(&self, fault: Fault, times: usize, names: impl Fn(Seen) -> bool + Send + 'static) {
        self.when_on(fault, times, move |_, seen| names(seen));
    }

    /// The same for a store of several volumes: `names` also receives the volume.
    pub fn when_on(
        &self,
        fault: Fault,
        times: usize,
        names: impl Fn(usize, Seen) -> bool + Send + 'static,
    ) {
        self.state().rules.push(Rule {
            names: Box::new(names),
            fault,
            times,
        });
    }

    /// Removes all rules.
    pub fn clear_rules(&self) {
        self.state().rules.clear();
    }

    /// How many operations met a rule.
    pub fn hits(&self) -> usize {
        self.state().hits
    }

    /// How often a call asked for operations past their deadline.
    pub fn expirations(&self) -> usize {
        self.state().expirations
    }

    /// Waits until an operation is held.
    pub fn wait_until_held(&self) {
        self.wait_until_so_many_are_held(1);
    }

    /// Waits until this many operations are held.
    pub fn wait_until_so_many_are_held(&self, number: usize) {
        self.wait_until(|state| state.held.len() >= number, "too few are ever held");
    }

    /// Waits until a call asks for operations past their deadline.
    pub fn wait_until_expired(&self) {
        self.wait_until(|state| state.expirations > 0, "nothing ever expires");
    }

    fn wait_until(&self, is_there: impl Fn(&State) -> bool, complaint: &str) {
        let is_none = |state: &mut State| !is_there(state);
        let changed = &self.changed;
        let waited = changed.wait_timeout_while(self.state(), PATIENCE, is_none);
        assert!(!waited.unwrap().1.timed_out(), "{complaint}");
    }

    /// Lets held operations go on.
    pub fn release(&self) {
        let held = std::mem::take(&mut self.state().held);
        // SAFETY: the submitter of these operations keeps their memory until they are answered.
        unsafe { self.inner.submit(held) };
    }

    /// The rule that applies to an operation.
    fn judge(&self, op: &Op) -> Option<Fault> {
        let what = seen(&op.action);
        let mut state = self.state();
        let rule = state
            .rules
            .iter_mut()
            .find(|rule| rule.times > 0 && (rule.names)(op.volume, what));
        let fault = rule.map(|rule| {
            rule.times -= 1;
            rule.fault
        });
        match (what, fault) {
            (Seen::Write { offset, bytes }, None) if op.volume == 0 => {
                let mut before = vec![0; bytes];
                self.file.read_exact_at(&mut before, offset).unwrap();
                state.before.push((offset, before));
            }
            (Seen::Sync, None) if op.volume == 0 => state.before.clear(),
            (_, fault) => {
                state.hits += usize::from(fault.is_some());
                if let Some(Fault::Drops(_)) = fault {
                    for (offset, bytes) in state.before.drain(..).step_by(2) {
                        self.file.write_all_at(&bytes, offset).unwrap();
                    }
                }
            }
        }
        fault
    }
}

impl Disk for Faulty {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let mut through = Vec::new();
        for mut op in ops {
            match self.judge(&op) {
                None => through.push(op),
                Some(Fault::Fails(errno) | Fault::Drops(errno)) => {
                    answer(op, Err(DiskError::Os(errno)));
                }
                Some(Fault::IsLost) => answer(op, Ok(())),
                Some(Fault::GoesTo(elsewhere)) => {
                    if let Action::Read { offset, .. } | Action::Write { offset, .. } =
                        &mut op.action
                    {
                        *offset = elsewhere;
                    }
                    through.push(op);
                }
                Some(Fault::Waits) => self.state().waiting.push(op),
                Some(Fault::IsHeld) => {
                    self.state().held.push(op);
                    self.changed.notify_all();
                }
            }
        }
        // SAFETY: this call has the same contract as the other disk's.
        unsafe { self.inner.submit(through) };
    }

    fn expire(&self) {
        self.state().expirations += 1;
        self.changed.notify_all();
        let is_late = |op: &mut Op| op.deadline.is_some_and(|until| until <= Instant::now());
        let late: Vec<Op> = self.state().waiting.extract_if(.., is_late).collect();
        late.into_iter()
            .for_each(|op| answer(op, Err(DiskError::Deadline)));
        self.inner.expire();
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: as above.
        unsafe { self.inner.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.inner.choice()
    }

    fn shutdown(&self) {
        self.release();
        self.inner.shutdown();
    }
}
