//! Completions for shells and manual pages, both made of the command line's own description.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::failure::{Ending, Failure};
use crate::report;

/// Print completions for a shell
///
/// For bash: larder completions bash > /etc/bash_completion.d/larder
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Write the manual pages to a directory, for packagers
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The directory, which is made if it is not there
    directory: PathBuf,
}

/// Runs `larder completions`.
pub fn completions(args: &CompletionsArgs, mut command: Command) -> Result<Ending, Failure> {
    let mut text = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(args.shell, &mut command, name, &mut text);
    report::print_text(&String::from_utf8_lossy(&text))?;
    Ok(Ending::Done)
}

/// Runs `larder man`: one page for the command, and one for each subcommand.
pub fn man(args: &ManArgs, command: Command) -> Result<Ending, Failure> {
    let made = fs::create_dir_all(&args.directory);
    made.and_then(|()| clap_mangen::generate_to(command, &args.directory))
        .map_err(|error| {
            Failure::environment(format!(
                "{}: writing manual pages: {error}",
                args.directory.display()
            ))
        })?;
    Ok(Ending::Done)
}
