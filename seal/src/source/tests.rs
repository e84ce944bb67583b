#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

const HEX: &str = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";

fn file(directory: &tempfile::TempDir, text: &str, mode: u32) -> KeySource {
    let path = directory.path().join(format!("{mode:o}.kek"));
    let _ = fs::remove_file(&path);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    KeySource::File(path)
}

fn command(line: &str) -> KeySource {
    KeySource::Command(line.to_owned())
}

#[test]
fn a_file_and_a_command_give_the_same_key() {
    let directory = tempfile::tempdir().unwrap();
    let vault = Vault::new();
    let id = file(&directory, &format!("{HEX}\n"), 0o400)
        .read(&vault)
        .unwrap()
        .id();
    for text in [HEX.to_owned(), format!("{HEX}\r\n")] {
        let source = file(&directory, &text, 0o600);
        assert_eq!(source.read(&vault).unwrap().id(), id);
    }
    assert_eq!(
        command(&format!("echo {HEX}")).read(&vault).unwrap().id(),
        id
    );
    let other = HEX.replace("00", "01");
    assert_ne!(
        command(&format!("printf {other}"))
            .read(&vault)
            .unwrap()
            .id(),
        id
    );
}

#[test]
fn a_text_that_is_no_key_is_refused_and_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let vault = Vault::new();
    let short = &HEX[..62];
    let long = format!("{HEX}00");
    let lines = format!("{HEX}\n\n");
    let letter = HEX.replacen("00", "0g", 1);
    let texts = ["", short, &long, &lines, &letter, &"0".repeat(4000)];
    for text in texts {
        let error = file(&directory, text, 0o400).read(&vault).unwrap_err();
        assert!(matches!(&error, SourceError::Text { .. }), "{error}");
        assert!(text.is_empty() || !error.to_string().contains(text));
        let error = command(&format!("printf '{text}'"))
            .read(&vault)
            .unwrap_err();
        assert!(matches!(error, SourceError::Text { .. }), "{error}");
    }
}

#[test]
fn a_file_that_others_can_use_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for mode in [0o440, 0o404, 0o644, 0o420, 0o401] {
        let error = file(&directory, HEX, mode).read(&Vault::new()).unwrap_err();
        assert!(error.to_string().contains("chmod 0400"), "{error}");
    }
    let absent = KeySource::File(directory.path().join("none"));
    assert!(matches!(
        absent.read(&Vault::new()),
        Err(SourceError::File { .. })
    ));
}

#[test]
fn a_command_that_fails_or_takes_too_long_gives_no_key() {
    let vault = Vault::new();
    let failed = command(&format!("echo {HEX}; exit 3"))
        .read(&vault)
        .unwrap_err();
    assert!(matches!(failed, SourceError::Failed(_)), "{failed}");
    let limit = Duration::from_millis(50);
    let lines = ["sleep 1000", "echo 00; sleep 1000", "exec >&-; sleep 1000"];
    for line in lines {
        let late = command(line).read_within(&vault, limit).unwrap_err();
        assert!(matches!(late, SourceError::Late), "{late}");
    }
}
