//! A terminal emulator, with a command on it.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use nix::pty::{Winsize, openpty};

use crate::support::honest::{Process, eventually, found};

/// The end of a frame: of a synchronized update.
const FRAME_END: &[u8] = b"\x1b[?2026l";

/// See the module.
pub struct Terminal {
    child: Process,
    keys: File,
    emulator: Arc<Mutex<vt100::Parser>>,
    /// The rows of the last whole frame; after the end of the command, the rows that are left.
    frame: Arc<Mutex<Vec<String>>>,
    reader: JoinHandle<String>,
}

impl Terminal {
    /// Runs `larder` on a terminal of its own, which controls it.
    pub fn of(arguments: &[&str], (rows, columns): (u16, u16)) -> Terminal {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(Some(&size), None).unwrap();
        let end = || Stdio::from(pty.slave.as_fd().try_clone_to_owned().unwrap());
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait", env!("CARGO_BIN_EXE_larder")])
            .args(arguments)
            .env("TERM", "xterm")
            .env("NO_COLOR", "1")
            .env_remove("LARDER_LOG");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn();
        let child = Process(child.unwrap());
        drop((command, pty.slave));
        let cells = |number| NonZeroU16::new(number).unwrap();
        let emulator = vt100::Parser::new(cells(rows), cells(columns), 0);
        let emulator = Arc::new(Mutex::new(emulator));
        let frame = Arc::<Mutex<Vec<String>>>::default();
        let keys = File::from(pty.master);
        let mut master = keys.try_clone().unwrap();
        let reader = std::thread::spawn({
            let (emulator, frame) = (emulator.clone(), frame.clone());
            move || {
                // A read of a terminal fails once no process has it open any more.
                let (mut sent, mut some, mut drawn) = (Vec::new(), [0; 4096], 0);
                while let Ok(count @ 1..) = master.read(&mut some) {
                    sent.extend_from_slice(&some[..count]);
                    while let Some(at) = memchr::memmem::find(&sent[drawn..], FRAME_END) {
                        let until = drawn + at + FRAME_END.len();
                        let mut emulator = emulator.lock().unwrap();
                        emulator.process(&sent[drawn..until]);
                        *frame.lock().unwrap() = rows_of(&emulator);
                        drawn = until;
                    }
                }
                let mut emulator = emulator.lock().unwrap();
                emulator.process(&sent[drawn..]);
                *frame.lock().unwrap() = rows_of(&emulator);
                String::from_utf8_lossy(&sent).into_owned()
            }
        });
        Terminal {
            child,
            keys,
            emulator,
            frame,
            reader,
        }
    }

    /// Waits until a whole frame shows all of these words. Its rows then.
    #[track_caller]
    pub fn shows(&self, words: &[&str]) -> Vec<String> {
        let mut last = Vec::new();
        found(&format!("the screen shows {words:?}"), || {
            last = self.frame.lock().unwrap().clone();
            let text = last.join("\n");
            words.iter().all(|word| text.contains(word)).then_some(())
        });
        last
    }

    pub fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Presses q. All that the terminal was sent; the command must end well and leave the screen as
    /// it was.
    pub fn quits(mut self) -> String {
        self.types("q");
        eventually("the command ends", || {
            self.child.0.try_wait().unwrap().is_some()
        });
        assert_eq!(self.child.0.wait().unwrap().code(), Some(0));
        let sent = self.reader.join().unwrap();
        let emulator = self.emulator.lock().unwrap();
        let screen = emulator.screen();
        assert!(!screen.alternate_screen() && !screen.hide_cursor());
        assert!(!sent.contains("panicked"), "{sent}");
        sent
    }
}

fn rows_of(emulator: &vt100::Parser) -> Vec<String> {
    let (_, columns) = emulator.screen().size();
    emulator.screen().rows(0, columns.get()).collect()
}
