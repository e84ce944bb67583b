"""The release at hand, the tools that it needs, and commands."""

import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

#: Tools of the Python index. Exact: a release is built twice with the same ones.
TOOLS = [
    "maturin==1.16.0", "ziglang==0.17.1", "cargo-zigbuild==0.24.1", "abi3audit==0.0.26",
    "auditwheel==6.8.2", "check-wheel-contents==0.6.3", "certifi==2026.10.19.post1",
]

MUSL = "{}-unknown-linux-musl"
GNU = "{}-unknown-linux-gnu"
#: Architectures, with their names in Debian and in images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Absent(Exception):
    """A part that this machine does not have, and that cannot be fetched."""


def run(*command, **options):
    """Runs a command, and shows it."""
    words = [str(word) for word in command]
    print("+", " ".join(words), file=sys.stderr, flush=True)
    return subprocess.run(words, check=options.pop("check", True), **options)


def output(*command, **options):
    """The standard output of a command."""
    return run(*command, stdout=subprocess.PIPE, text=True, **options).stdout


def needs(program, package=""):
    """A program's path."""
    from shutil import which

    path = which(program) or which(program, path="/usr/sbin:/sbin")
    if path is None:
        raise Absent(f"{program} is not installed" + (f" (Debian: {package})" if package else ""))
    return path


def cache():
    """Fetched tools and roots, kept between runs."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LARDER_RELEASE_CACHE") or home / "larder" / "release")


class Steps:
    """Runs the steps, and lists what was skipped and what failed."""

    def __init__(self):
        self.skipped = []
        self.failed = []

    def step(self, name, act, *arguments):
        """Runs one step; its value, or `None`."""
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        try:
            value = act(*arguments)
        except Absent as why:
            self.skipped.append(f"{name}: {why}")
            print(f"SKIPPED: {name}: {why}")
            return None
        except (subprocess.CalledProcessError, OSError, AssertionError) as why:
            self.failed.append(f"{name}: {why}")
            print(f"FAILED: {name}: {why}")
            return None
        print(f"   {time.monotonic() - began:.0f} s", flush=True)
        return value

    def end(self):
        """The exit code."""
        print("\n== summary")
        for line in self.skipped:
            print(f"SKIPPED: {line}")
        for line in self.failed:
            print(f"FAILED: {line}")
        print("failed" if self.failed else "done")
        return 1 if self.failed else 0


@dataclass(frozen=True)
class Release:
    """A release: the tree that it is built from, and the directory of its files."""

    tree: Path
    out: Path
    target: Path
    epoch: int
    tag: str

    @cached_property
    def version(self):
        """The version of the workspace."""
        return tomllib.loads((self.tree / "Cargo.toml").read_text())["workspace"]["package"]["version"]

    @cached_property
    def tools(self):
        """The directory of the tools' programs."""
        place = cache() / "tools"
        programs = place / "bin"
        stamp = place / "installed"
        if not stamp.exists() or stamp.read_text().split() != TOOLS:
            try:
                run(sys.executable, "-m", "venv", place)
                run(programs / "pip", "install", "--quiet", *TOOLS)
            except subprocess.CalledProcessError as error:
                raise Absent("the tools of the Python index cannot be installed") from error
            stamp.write_text("\n".join(TOOLS))
        return programs

    def environment(self):
        """Of a build: the same in each directory, and for each user."""
        home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
        # Of several that fit, the last one counts.
        paths = {home: "/cargo", self.tree: "/larder", self.target: "/target"}
        flags = [f"--remap-path-prefix={path}={name}" for path, name in paths.items()]
        c_flags = " ".join(f"-ffile-prefix-map={path}={name}" for path, name in paths.items())
        added = {
            "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
            "CARGO_INCREMENTAL": "0",
            "CARGO_TARGET_DIR": str(self.target),
            "CFLAGS": c_flags,
            "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
            "SOURCE_DATE_EPOCH": str(self.epoch),
            # Zig's own cache would give objects that hold the time of an earlier tag.
            "ZIG_GLOBAL_CACHE_DIR": str(self.target / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(self.target / "zig"),
        }
        return {**os.environ, **added}

    def rust(self, target):
        """Makes sure of a target's standard library."""
        listed = output("rustc", "--print", "sysroot").strip()
        if not (Path(listed) / "lib/rustlib" / target / "lib").is_dir():
            try:
                run("rustup", "target", "add", target)
            except (OSError, subprocess.CalledProcessError) as error:
                raise Absent(f"the Rust target {target} cannot be fetched") from error


def changes(tree, version):
    """The section of the changelog about a version."""
    text = (tree / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\].*?$(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    assert found, f"CHANGELOG.md has no section of {version}"
    return found[1].strip() + "\n"
