"""Wheels, static commands and C libraries of both architectures."""

import gzip
import hashlib
import json
import shutil
import tarfile
import tomllib
import uuid
import zipfile
from base64 import urlsafe_b64encode
from datetime import datetime, timezone

from .base import GNU, MUSL, needs, run

#: The oldest C library of a wheel.
GLIBC = "manylinux_2_28"
GLIBC_LIBRARY = "2.28"
PROFILE = "ship"


def command(release, architecture):
    """The static command `larder` of an architecture, stripped."""
    target = MUSL.format(architecture)
    release.rust(target)
    run(
        release.tools / "cargo-zigbuild", "zigbuild", "--locked", "--profile", PROFILE, "--package", "larder",
        "--features", "charts,remote", "--target", target, cwd=release.tree, env=release.environment(),
    )
    made = release.out / f"larder-{release.version}-linux-{architecture}"
    shutil.copy2(release.target / target / PROFILE / "larder", made)
    made.chmod(0o755)
    return made


def wheel(release, architecture):
    """The wheel of an architecture, for each CPython from 3.11 on."""
    target = GNU.format(architecture)
    release.rust(target)
    made = release.target / "wheels" / architecture
    shutil.rmtree(made, ignore_errors=True)
    run(
        release.tools / "maturin", "build", "--locked", "--profile", PROFILE, "--zig", "--compatibility", GLIBC,
        "--target", target, "--manifest-path", release.tree / "python/Cargo.toml", "--out", made,
        cwd=release.tree, env=release.environment(),
    )
    (built,) = made.glob("*.whl")
    to = release.out / built.name
    settle(built, to, release)
    return to


def library(release, architecture, papers):
    """The C library of an architecture: headers, the shared library, the archive, files for pkg-config and CMake, `papers`."""
    target = GNU.format(architecture)
    tools = {name.upper(): needs(f"{architecture}-linux-gnu-{name}", f"binutils-{architecture}-linux-gnu".replace("_", "-"))
             for name in ("ld", "objcopy", "ar")}
    release.rust(target)
    run(
        release.tools / "cargo-zigbuild", "zigbuild", "--locked", "--profile", PROFILE, "--package", "larder-capi",
        "--features", "remote", "--target", f"{target}.{GLIBC_LIBRARY}", cwd=release.tree, env=release.environment(),
    )
    name = f"larder-capi-{release.version}-linux-{architecture}"
    prefix = release.target / "libraries" / name
    shutil.rmtree(prefix, ignore_errors=True)
    compiler = f"{release.tools}/python -m ziglang cc -target {architecture}-linux-gnu.{GLIBC_LIBRARY} -s"
    run(
        release.tree / "capi/install", prefix, "--archive", release.target / target / PROFILE / "liblarder_capi.a",
        env={**release.environment(), **tools, "CC": compiler},
    )
    documents = prefix / "share/doc/larder-capi"
    documents.mkdir(parents=True)
    for paper in [release.tree / "LICENSE", *papers]:
        shutil.copy2(paper, documents)
    to = release.out / f"{name}.tar.gz"
    pack(prefix, to, release)
    return to


def pack(directory, to, release):
    """An archive that depends on the files alone."""
    def settled(entry):
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = release.epoch, 0, 0, "", ""
        return entry

    with open(to, "wb") as file, gzip.GzipFile("", "wb", mtime=release.epoch, fileobj=file) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(directory.rglob("*")):
                archive.add(path, f"{directory.name}/{path.relative_to(directory)}", recursive=False, filter=settled)


def settle(built, to, release):
    """Copies a wheel without what differs between two builds: times, the order of its files, and the
    serial number and paths of its list of components."""
    with zipfile.ZipFile(built) as old:
        names = sorted(name for name in old.namelist() if not name.endswith("/"))
        files = {name: (old.getinfo(name).external_attr, old.read(name)) for name in names}
    (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
    for name in names:
        if "/sboms/" in name and name.endswith(".json"):
            attributes, content = files[name]
            files[name] = attributes, settled_components(content, release)
    lines = [f"{name},{digest(content)},{len(content)}" for name, (_, content) in files.items() if name != record]
    files[record] = files[record][0], "\n".join([*lines, f"{record},,"]).encode() + b"\n"
    moment = datetime.fromtimestamp(release.epoch, timezone.utc).timetuple()[:6]
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for name, (attributes, content) in files.items():
            info = zipfile.ZipInfo(name, moment)
            info.compress_type, info.external_attr, info.create_system = zipfile.ZIP_DEFLATED, attributes, 3
            new.writestr(info, content)


def digest(content):
    """As a wheel's RECORD has it."""
    return "sha256=" + urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def settled_components(content, release):
    """A list of components whose serial number and time follow from the release."""
    listed = json.loads(content.decode().replace(str(release.tree), "/larder"))
    listed["serialNumber"] = serial(release, "wheel")
    listed.get("metadata", {})["timestamp"] = moment(release)
    return json.dumps(listed, indent=1, sort_keys=True).encode()


def serial(release, what):
    """A serial number that follows from the release."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"larder {release.tag} {what}").urn


def moment(release):
    """The release's time."""
    return datetime.fromtimestamp(release.epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def module(release):
    """The name of the Python module."""
    text = (release.tree / "python/pyproject.toml").read_text()
    return tomllib.loads(text)["tool"]["maturin"]["module-name"].split(".")[0]
