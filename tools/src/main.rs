//! The `larder` binary: the command line of [`larder_tools`].

#![forbid(unsafe_code)]

use std::process::ExitCode;

use larder_tools::cli::{Program, complain, run};

fn main() -> ExitCode {
    match Program::running() {
        Ok(program) => ExitCode::from(run(&program, std::env::args_os().skip(1))),
        Err(error) => {
            complain(&format_args!(
                "finding the running program: {error}; is /proc mounted?"
            ));
            ExitCode::from(3)
        }
    }
}
