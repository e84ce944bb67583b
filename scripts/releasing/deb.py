"""Packages for Debian and Ubuntu: the static command, units, manual pages, completions."""

import gzip
import hashlib
import os
import shutil
import tempfile
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path

from .base import ARCHITECTURES, needs, output, run

MAINTAINER = "The Larder authors <noreply@example.invalid>"
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/larder",
    "zsh": "usr/share/zsh/vendor-completions/_larder",
    "fish": "usr/share/fish/vendor_completions.d/larder.fish",
}
CONTROL = """Package: larder
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {kib}
Depends: adduser
Section: database
Priority: optional
Description: page store on NVMe for the KV cache of LLM servers
 Larder keeps pages of the KV cache on local NVMe disks, below SGLang, vLLM and
 LMCache. A server finds them again after a restart.
"""
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: larder

Files: *
Copyright: 2026 the Larder authors
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
 The licences of the linked libraries are in licences.txt.gz beside this file.
"""
#: The command is static, so that one package suits all releases of Debian.
OVERRIDES = "larder: statically-linked-binary [usr/bin/larder]\n"
POSTINST = """#!/bin/sh
set -e
if [ "$1" = configure ] && ! getent passwd larder >/dev/null; then
    adduser --system --group --no-create-home --home /nonexistent --quiet larder
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
fi
"""


def deb(release, command, architecture, native, licences):
    """The package of an architecture. `native` is the command that runs here: it prints manual pages
    and completions."""
    needs("dpkg-deb", "dpkg")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        lay(root, release, command, native, licences)
        kib = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
        control = root / "DEBIAN"
        control.mkdir()
        sums = [
            f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n"
            for path in sorted(root.rglob("*"))
            if path.is_file() and control not in path.parents
        ]
        (control / "md5sums").write_text("".join(sums))
        (control / "postinst").write_text(POSTINST)
        (control / "postinst").chmod(0o755)
        facts = {"version": release.version, "maintainer": MAINTAINER, "kib": kib}
        (control / "control").write_text(CONTROL.format(architecture=ARCHITECTURES[architecture], **facts))
        for path in [root, *root.rglob("*")]:
            os.utime(path, (release.epoch, release.epoch), follow_symlinks=False)
            if path.is_dir():
                path.chmod(0o755)
        to = release.out / f"larder_{release.version}_{ARCHITECTURES[architecture]}.deb"
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(release.epoch)}
        run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, to, env=environment)
    return to


def lay(root, release, command, native, licences):
    """The files of the package."""

    def put(path, content, mode=0o644):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        (root / path).chmod(mode)

    put("usr/bin/larder", command.read_bytes(), 0o755)
    pages = root.parent / "man"
    run(native, "man", pages)
    for page in sorted(pages.iterdir()):
        put(f"usr/share/man/man1/{page.name}.gz", gzip.compress(page.read_bytes(), 9, mtime=0))
    shutil.rmtree(pages)
    for shell, path in COMPLETIONS.items():
        put(path, output(native, "completions", shell).encode())
    for unit in sorted((release.tree / "deploy/systemd").glob("*.service")):
        text = unit.read_text().replace("/usr/local/bin/larder", "/usr/bin/larder")
        put(f"usr/lib/systemd/system/{unit.name}", text.encode())
    date = format_datetime(datetime.fromtimestamp(release.epoch, timezone.utc))
    changed = (
        f"larder ({release.version}) unstable; urgency=medium\n\n"
        f"  * Release {release.version}: see CHANGELOG.md of the project.\n\n -- {MAINTAINER}  {date}\n"
    )
    put("usr/share/lintian/overrides/larder", OVERRIDES.encode())
    put("usr/share/doc/larder/copyright", COPYRIGHT.encode())
    put("usr/share/doc/larder/changelog.gz", gzip.compress(changed.encode(), 9, mtime=0))
    put("usr/share/doc/larder/licences.txt.gz", gzip.compress(licences.read_bytes(), 9, mtime=0))
