//! Writes the seed corpora: `cargo run -p larder-fuzz --example seeds [DIRECTORY]`. Each target
//! gets its own directory. The default is `fuzz/corpus`.

use std::fs;
use std::path::PathBuf;

use larder_fuzz::TARGETS;
use larder_fuzz::seeds::seeds;

fn main() -> Result<(), std::io::Error> {
    let usual = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let corpus = std::env::args_os().nth(1).map_or_else(usual, PathBuf::from);
    for (target, _) in TARGETS {
        let directory = corpus.join(target);
        fs::create_dir_all(&directory)?;
        let seeds = seeds(target);
        for (seed, number) in seeds.iter().zip(0..) {
            fs::write(directory.join(format!("seed-{number:03}")), seed)?;
        }
        println!("{target}: {} seeds", seeds.len());
    }
    Ok(())
}
