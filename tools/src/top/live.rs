//! The terminal and its keys.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use ratatui::crossterm::SynchronizedUpdate;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::looks::{self, Seen};
use super::screen;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;

/// Shortest time between two looks, to keep the load on the owner low.
const EVERY_MIN: Duration = Duration::from_millis(100);

/// Time in which a key or an answer is noticed.
const SOON: Duration = Duration::from_millis(50);

/// Shows the store until the operator ends it.
pub fn run(path: &Path, every: Duration) -> Result<Ending, Failure> {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    if dumb || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::usage(format!(
            "top draws on a terminal, and this is none (or TERM is `dumb` or not set); \
             `larder stat {} --watch` prints lines",
            path.display()
        )));
    }
    if every < EVERY_MIN {
        return Err(Failure::usage("--every: at least 100ms".to_owned()));
    }
    let interrupt = Interrupt::watch();
    let (tell, told) = mpsc::sync_channel(1);
    let looked_at = path.to_owned();
    // A process of its own would be needed to end a look at an owner that hangs; the thread
    // ends with this process.
    std::thread::Builder::new()
        .name("looks".to_owned())
        .spawn(move || looks::look_on(&looked_at, every, &tell))
        .map_err(|error| Failure::thread(&error))?;
    let lost = |error: io::Error| Failure::environment(format!("drawing: {error}"));
    let mut terminal = ratatui::try_init().map_err(lost)?;
    let mut seen = Seen::new(path);
    let ended = loop {
        match told.try_recv() {
            Ok(look) => seen.take(look),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                break Err(Failure::environment(
                    "the thread that looks at the store ended",
                ));
            }
        }
        // A terminal that knows synchronized updates shows whole frames alone.
        let drawn = io::stdout().sync_update(|_| {
            terminal.draw(|frame| screen::draw(frame, &mut seen))?;
            Ok(())
        });
        if let Err(error) = drawn.and_then(|drawn| drawn) {
            break Err(lost(error));
        }
        match next_key() {
            Ok(Some(key)) if ends(key) => break Ok(Ending::Done),
            Ok(Some(key)) => turn(&mut seen, key),
            Ok(None) if interrupt.is_raised() => break Ok(Ending::Interrupted),
            Ok(None) => {}
            Err(error) => break Err(Failure::environment(format!("reading keys: {error}"))),
        }
    };
    let restored = ratatui::try_restore().map_err(lost);
    ended.and_then(|ending| restored.map(|()| ending))
}

/// A key, if one comes soon.
fn next_key() -> io::Result<Option<KeyEvent>> {
    if !event::poll(SOON)? {
        return Ok(None);
    }
    Ok(match event::read()? {
        Event::Key(key) if key.kind == KeyEventKind::Press => Some(key),
        _ => None,
    })
}

fn ends(key: KeyEvent) -> bool {
    let is_stop = key.modifiers.contains(KeyModifiers::CONTROL)
        && matches!(key.code, KeyCode::Char('c' | 'd'));
    is_stop || matches!(key.code, KeyCode::Char('q' | 'Q') | KeyCode::Esc)
}

fn turn(seen: &mut Seen, key: KeyEvent) {
    match key.code {
        KeyCode::Down => seen.first_space = seen.first_space.saturating_add(1),
        KeyCode::Up => seen.first_space = seen.first_space.saturating_sub(1),
        KeyCode::PageDown => seen.first_space = seen.first_space.saturating_add(10),
        KeyCode::PageUp => seen.first_space = seen.first_space.saturating_sub(10),
        _ => {}
    }
}
