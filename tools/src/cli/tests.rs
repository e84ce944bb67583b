#![allow(clippy::unwrap_used)]

use clap::Parser;

use super::Cli;
use crate::gone;

fn refusal(line: &str) -> String {
    let mut error = Cli::try_parse_from(line.split(' ')).err().unwrap();
    gone::explain(&mut error);
    error.to_string()
}

#[test]
fn an_option_that_is_gone_is_refused_with_its_replacement() {
    for (command, option, replacement) in gone::rows() {
        let given = if option == "*" { "trace" } else { option };
        let said = refusal(&format!("larder {command} {given}"));
        let words = [given, replacement];
        assert!(
            words.iter().all(|word| said.contains(word)),
            "{command}: {said}"
        );
    }
}

#[test]
fn another_unknown_option_is_refused_alone() {
    for line in [
        "larder replay store t --bogus",
        "larder bogus",
        "larder import a b --syncs",
    ] {
        let plain = Cli::try_parse_from(line.split(' '))
            .err()
            .unwrap()
            .to_string();
        assert_eq!(refusal(line), plain);
    }
}
