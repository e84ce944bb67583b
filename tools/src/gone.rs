//! Options of earlier versions: the refusal of one names its replacement.

use clap::Error;
use clap::error::{ContextKind, ContextValue};

/// Rows of commands, options, and the replacement. `*`: any option or word in the place of a
/// subcommand.
const GONE: &str = "\
replay | * | give one of `larder replay store`, `tiers` (for --l1), `policy`, and `l4` (for --l4)
bench | --layers | pages have 32 layers
replay l4 | --l4 | give its value to --admission
replay l4 | --behind | a block is published 2 s after its use
replay l4 | --restart | the disks are lost in the middle of the trace
replay policy | --policy | it is the learned one
replay policy | --page-bytes, --segment-size | pages have 2 MiB, segments 16 MiB
replay store, replay tiers | --wait | a put waits for 30 s
replay store, replay tiers | --depth, --volume | replay on a store of one volume with the default
replay tiers | --disk, --segment-size, --sync | the defaults hold
delete, import, remote pull | --disk, --depth | the defaults hold; `larder serve` has it
delete, import, remote pull | --sync | the owner decides, and the end of the command flushes
";

/// The command, the option, and the replacement of each.
pub fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    GONE.lines().flat_map(|line| {
        let (commands, rest) = line.split_once(" | ").unwrap_or_default();
        let (options, replacement) = rest.split_once(" | ").unwrap_or_default();
        let each = commands.split(", ");
        each.flat_map(move |command| {
            let options = options.split(", ");
            options.map(move |option| (command, option, replacement))
        })
    })
}

/// Adds the replacement to the refusal of an option, or of an earlier form.
pub fn explain(error: &mut Error) {
    let Some(replacement) = replacement(error) else {
        return;
    };
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedSubcommand);
    let tip = ContextValue::StyledStrs(vec![replacement.into()]);
    error.insert(ContextKind::Suggested, tip);
}

fn replacement(error: &Error) -> Option<&'static str> {
    let ContextValue::StyledStr(usage) = error.get(ContextKind::Usage)? else {
        return None;
    };
    // `Usage: larder replay l4 [OPTIONS] <TRACE>`.
    let usage = usage.to_string();
    let words = usage.split_whitespace().skip(2);
    let words = words.take_while(|word| word.starts_with(|first: char| first.is_ascii_lowercase()));
    let command = words.collect::<Vec<_>>().join(" ");
    let kinds = [ContextKind::InvalidArg, ContextKind::InvalidSubcommand];
    let given = kinds
        .into_iter()
        .find_map(|kind| error.get(kind))?
        .to_string();
    let is_it = |(of, gone, _): &(&str, &str, &str)| *of == command && ["*", &given].contains(gone);
    rows().find(is_it).map(|(.., replacement)| replacement)
}
