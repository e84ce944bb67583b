"""The parts of `scripts/release`: builds, packages, papers, checks."""
