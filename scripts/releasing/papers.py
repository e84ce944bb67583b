"""Papers of a release: its components, their licences, checksums, the note."""

import hashlib
import json
import tomllib
from pathlib import Path

from .base import ARCHITECTURES, GNU, MUSL, changes, output
from .builds import moment, serial

#: Names of files with a licence, in a crate's directory.
LICENCES = ("LICEN", "COPYING", "NOTICE", "COPYRIGHT")
#: Crates that a product is built from: what it is, its features, its target. A wheel has its list of components inside.
PRODUCTS = {
    "larder": ("application", "larder/charts,larder/remote", MUSL),
    "larder-capi": ("library", "larder-capi/remote", GNU),
    "larder-python": ("library", "larder-python/module", GNU),
}


def linked(release):
    """By product, its crates from the resolved graph: without those of builds and tests."""
    return {product: crates(release, product) for product in PRODUCTS}


def crates(release, product):
    """The crates that are linked into a product, of both architectures."""
    packages, kept = {}, set()
    features, target = PRODUCTS[product][1:]
    for architecture in ARCHITECTURES:
        graph = json.loads(output(
            "cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target.format(architecture),
            "--features", features, cwd=release.tree,
        ))
        packages |= {package["id"]: package for package in graph["packages"]}
        nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
        left = [package["id"] for package in graph["packages"] if package["name"] == product]
        assert left, f"there is no crate {product}"
        while left:
            name = left.pop()
            if name in kept:
                continue
            kept.add(name)
            for edge in nodes[name]["deps"]:
                if any(kind["kind"] is None for kind in edge["dep_kinds"]):
                    left.append(edge["pkg"])
    return in_order(packages[name] for name in kept)


def in_order(crates):
    return sorted(crates, key=lambda package: (package["name"], package["version"]))


def components(release, linked, product):
    """The components of a product, in CycloneDX's form."""
    locked = tomllib.loads((release.tree / "Cargo.lock").read_text())["package"]
    sums = {(package["name"], package["version"]): package.get("checksum") for package in locked}
    rows = []
    for crate in linked[product]:
        name, version = crate["name"], crate["version"]
        row = {"type": "library", "name": name, "version": version, "purl": f"pkg:cargo/{name}@{version}"}
        row["bom-ref"] = row["purl"]
        if crate["license"]:
            row["licenses"] = [{"expression": crate["license"].replace("/", " OR ")}]
        if sums.get((name, version)):
            row["hashes"] = [{"alg": "SHA-256", "content": sums[name, version]}]
        rows.append(row)
    kind = PRODUCTS[product][0]
    described = {"type": kind, "name": product, "version": release.version, "bom-ref": product}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": serial(release, product),
        "version": 1,
        "metadata": {"timestamp": moment(release), "component": described},
        "components": rows,
    }
    to = release.out / f"{product}-{release.version}.cdx.json"
    to.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return to


def licences(release, linked):
    """The licences of all linked crates, each text once."""
    texts = {}
    for crate in in_order({crate["id"]: crate for crates in linked.values() for crate in crates}.values()):
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
    head = "Licences of the crates in the command, the wheel and the C library. The certificates of authorities\n"
    head += "in the image are Mozilla's (MPL-2.0), as the Python package certifi has them.\n\n"
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


