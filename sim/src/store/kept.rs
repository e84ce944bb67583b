//! What the learned policy hands out for the file beside the store, and what it may get back: of a
//! whole file all that was written last, of any other nothing, or what an earlier save wrote. Notes
//! of pages count from the last run alone.

/// One save.
#[derive(Debug)]
struct Save {
    run: u32,
    lessons: Vec<u8>,
    notes: Vec<u128>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Kept {
    /// The present run, and the last run before it that wrote to the volumes.
    run: u32,
    run_before: u32,
    /// Notes since the last save.
    notes: Vec<u128>,
    saves: Vec<Save>,
    /// No power was lost since the last save.
    is_whole: bool,
    /// The store is being closed, and was not saved since.
    is_unsaved: bool,
}

impl Kept {
    /// An open begins. Its volumes are of this run.
    pub fn begin(&mut self, run_before: u32) {
        (self.run_before, self.is_unsaved) = (run_before, false);
        self.notes.clear();
    }

    /// The number of the run that begins.
    pub fn runs(&mut self, run: u32) {
        self.run = run;
    }

    pub fn lose_power(&mut self) {
        self.is_whole = false;
    }

    pub fn close(&mut self) {
        self.is_unsaved = true;
    }

    /// The store was closed.
    pub fn check_closed(&self) {
        assert!(
            !self.is_unsaved || self.saves.is_empty(),
            "a close does not save what the policy knows"
        );
    }

    pub fn note(&mut self, note: Option<u128>) {
        self.notes.extend(note);
    }

    pub fn save(&mut self, lessons: &[u8]) {
        let mut notes = std::mem::take(&mut self.notes);
        notes.sort_unstable();
        self.saves.push(Save {
            run: self.run,
            lessons: lessons.to_owned(),
            notes,
        });
        (self.is_whole, self.is_unsaved) = (true, false);
    }

    /// An open recalls these.
    pub fn check_recalled(&self, lessons: &[u8], notes: &[u128]) {
        let last = self.saves.last();
        let of_last_run = |save: &&Save| save.run == self.run_before;
        if let Some(last) = last.filter(|_| self.is_whole) {
            let expected = Some(last).filter(of_last_run);
            let expected = expected.map_or(&[][..], |save| &save.notes);
            assert!(
                lessons == last.lessons && notes == expected,
                "an open does not recall what was saved last"
            );
            return;
        }
        let mut saves = self.saves.iter().filter(|save| save.lessons == lessons);
        let is_nothing = lessons.is_empty() && notes.is_empty();
        let is_saved = saves.any(|save| match notes.is_empty() {
            true => true,
            false => save.run == self.run_before && save.notes == notes,
        });
        assert!(
            is_nothing || is_saved,
            "an open recalls what the last run did not save"
        );
    }
}
