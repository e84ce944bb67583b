"""The crates of the command: which ones are published, in which order, and their packages."""

import json
import os
import shutil

from .base import ROOT, output, run


def published(tree=ROOT):
    """Names of the published crates, each after those that it needs."""
    graph = json.loads(output("cargo", "metadata", "--no-deps", "--format-version", "1", cwd=tree))
    crates = {crate["name"]: crate for crate in graph["packages"] if crate["publish"] is None}
    left, order = dict(crates), []
    while left:
        # A dependency of tests alone has no version, and is not part of the package.
        ready = sorted(
            name for name, crate in left.items()
            if not any(of["name"] in left and of["name"] != name and is_kept(of) for of in crate["dependencies"])
        )
        assert ready, "the published crates depend on each other in a circle: " + ", ".join(sorted(left))
        order += ready
        for name in ready:
            del left[name]
    return order


def is_kept(dependency):
    """Whether a dependency is in the package's manifest."""
    return dependency["kind"] != "dev" or dependency["req"] != "*"


def package(names, *options, tree=ROOT, environment=None):
    """Packs crates at once, so that each finds the others."""
    chosen = [word for name in names for word in ("--package", name)]
    run("cargo", "package", "--quiet", "--locked", *options, *chosen, cwd=tree, env=environment)


def crates(release):
    """The packages of all published crates, each built from its own package."""
    names = published(release.tree)
    environment = {**os.environ, "CARGO_TARGET_DIR": str(release.target), "CARGO_INCREMENTAL": "0"}
    package(names, tree=release.tree, environment=environment)
    to = release.out
    for name in names:
        shutil.copy2(release.target / "package" / f"{name}-{release.version}.crate", to)
