#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

use clap::{Command, CommandFactory, Parser};

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

/// An option, its command, and whether it is an expert setting.
type Options = BTreeSet<(String, String, bool)>;

const OF_ALL: [&str; 4] = ["help", "json", "log-format", "version"];

fn options_of(command: &Command, name: &str, found: &mut Options) {
    for option in command.get_arguments() {
        let is_expert = option.get_help_heading() == Some("Expert settings");
        match option.get_long() {
            Some(long) if !OF_ALL.contains(&long) => {
                found.insert((long.to_owned(), name.to_owned(), is_expert));
            }
            _ => {}
        }
    }
    for under in command.get_subcommands() {
        if !under.is_hide_set() {
            options_of(
                under,
                format!("{name} {}", under.get_name()).trim_start(),
                found,
            );
        }
    }
}

/// The rows of docs/options.md.
fn listed() -> Options {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/options.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut is_expert = false;
    let mut listed = Options::new();
    for line in text.lines() {
        is_expert |= line == "## Expert settings";
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let [_, option, commands, reason, _] = cells[..]
            && let Some(option) = option.strip_prefix("`--")
        {
            assert!(!reason.is_empty(), "{line}");
            let commands = commands.split(", ").map(str::to_owned);
            let option = option.trim_end_matches('`');
            listed.extend(commands.map(|command| (option.to_owned(), command, is_expert)));
        }
    }
    listed
}

#[test]
fn every_option_is_in_the_list_with_its_reason_and_no_other() {
    let mut found = Options::new();
    options_of(&Cli::command(), "", &mut found);
    let mut listed = listed();
    if !cfg!(feature = "remote") {
        listed.retain(|(_, command, _)| command != "remote bench");
    }
    let missing: Vec<_> = found.difference(&listed).collect();
    let besides: Vec<_> = listed.difference(&found).collect();
    assert!(
        missing.is_empty() && besides.is_empty(),
        "missing {missing:?}, besides {besides:?}"
    );
}
