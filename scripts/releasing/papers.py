"""Papers of a release: its components, their licences, checksums, the note."""

import hashlib
import json
import tomllib
from pathlib import Path

from .base import MUSL, changes, output
from .builds import moment, serial

#: Names of files with a licence, in a crate's directory.
LICENCES = ("LICEN", "COPYING", "NOTICE", "COPYRIGHT")


def linked(release):
    """The crates in the static commands, from the resolved graph: without those of builds and tests."""
    packages, kept = {}, set()
    for architecture in ("x86_64", "aarch64"):
        graph = json.loads(output(
            "cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", MUSL.format(architecture),
            "--features", "larder/remote", cwd=release.tree,
        ))
        packages |= {package["id"]: package for package in graph["packages"]}
        nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
        left = [package["id"] for package in graph["packages"] if package["name"] == "larder"]
        while left:
            name = left.pop()
            if name in kept:
                continue
            kept.add(name)
            for edge in nodes[name]["deps"]:
                if any(kind["kind"] is None for kind in edge["dep_kinds"]):
                    left.append(edge["pkg"])
    chosen = [packages[name] for name in kept]
    return sorted(chosen, key=lambda package: (package["name"], package["version"]))


def components(release, crates):
    """The components of the static commands, in CycloneDX's form."""
    locked = tomllib.loads((release.tree / "Cargo.lock").read_text())["package"]
    sums = {(package["name"], package["version"]): package.get("checksum") for package in locked}
    rows = []
    for crate in crates:
        name, version = crate["name"], crate["version"]
        row = {"type": "library", "name": name, "version": version, "purl": f"pkg:cargo/{name}@{version}"}
        row["bom-ref"] = row["purl"]
        if crate["license"]:
            row["licenses"] = [{"expression": crate["license"].replace("/", " OR ")}]
        if sums.get((name, version)):
            row["hashes"] = [{"alg": "SHA-256", "content": sums[name, version]}]
        rows.append(row)
    described = {"type": "application", "name": "larder", "version": release.version, "bom-ref": "larder"}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": serial(release, "command"),
        "version": 1,
        "metadata": {"timestamp": moment(release), "component": described},
        "components": rows,
    }
    to = release.out / f"larder-{release.version}.cdx.json"
    to.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return to


def licences(release, crates):
    """The licences of all linked crates, each text once."""
    texts = {}
    for crate in crates:
        home = Path(crate["manifest_path"]).parent
        files = [path for path in sorted(home.iterdir()) if path.is_file() and path.name.upper().startswith(LICENCES)]
        if not files and release.tree in home.parents:
            files = [release.tree / "LICENSE"]
        assert files, f"{crate['name']} has no licence file"
        for path in files:
            text = path.read_text(errors="replace").strip()
            texts.setdefault(text, []).append(f"{crate['name']} {crate['version']} ({crate['license']}): {path.name}")
    rule = "=" * 80
    parts = [f"{rule}\n" + "\n".join(users) + f"\n{rule}\n\n{text}\n" for text, users in texts.items()]
    head = "Licences of the libraries in the command and the wheel. The certificates of authorities in the\n"
    head += "image are Mozilla's (MPL-2.0), as the Python package certifi has them.\n\n"
    to = release.out / "licences.txt"
    to.write_text(head + "\n".join(parts))
    return to


def note(release):
    """The release note: the changelog's section."""
    to = release.out / "NOTES.md"
    to.write_text(changes(release.tree, release.version))
    return to


def checksums(release):
    """SHA256SUMS of all files."""
    files = sorted(path for path in release.out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (release.out / "SHA256SUMS").write_text("".join(lines))


def spoilt(out):
    """The files that are missing, unlisted, or not as SHA256SUMS states."""
    listed = dict(reversed(line.split("  ", 1)) for line in (out / "SHA256SUMS").read_text().splitlines())
    there = {path.name for path in out.iterdir() if path.is_file()} - {"SHA256SUMS"}
    wrong = sorted(there ^ set(listed))
    for name in sorted(there & set(listed)):
        if hashlib.sha256((out / name).read_bytes()).hexdigest() != listed[name]:
            wrong.append(name)
    return wrong


