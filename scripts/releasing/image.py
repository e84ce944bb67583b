"""The image: an OCI archive of both architectures, from scratch, made without a daemon.

It holds the static command, certificates of authorities, /tmp, and users and groups by number.
"""

import gzip
import hashlib
import io
import json
import tarfile

from .base import ARCHITECTURES, output
from .builds import moment

KIND = "application/vnd.oci.image."
#: The user of the image; a pod's security context may name another.
USER = 7000
PASSWD = f"root:x:0:0::/:\nlarder:x:{USER}:{USER}::/:\n"
GROUP = f"root:x:0:\nlarder:x:{USER}:\n"


def image(release, commands):
    """The archive of the image; `commands` are the static commands by architecture."""
    found = output(release.tools / "python", "-c", "import certifi; print(certifi.contents())")
    blobs = {}
    entries = [entry(release, blobs, commands[name], name, found) for name in sorted(commands)]
    index = {
        "schemaVersion": 2,
        "mediaType": KIND + "index.v1+json",
        "manifests": entries,
        "annotations": {"org.opencontainers.image.version": release.version},
    }
    # The layout names one index, whose reference is the release.
    listed = blob(blobs, pack(index), KIND + "index.v1+json")
    listed["annotations"] = {"org.opencontainers.image.ref.name": release.version}
    top = {"schemaVersion": 2, "mediaType": KIND + "index.v1+json", "manifests": [listed]}
    to = release.out / f"larder-{release.version}-image.tar"
    with tarfile.open(to, "w", format=tarfile.USTAR_FORMAT) as archive:
        add(archive, release, "oci-layout", 0o644, pack({"imageLayoutVersion": "1.0.0"}))
        add(archive, release, "index.json", 0o644, pack(top))
        for name in sorted(blobs):
            add(archive, release, f"blobs/sha256/{name}", 0o644, blobs[name])
    return to


def entry(release, blobs, command, architecture, certificates):
    """Layer, configuration and manifest of one architecture; returns its row of the index."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, mode in [("tmp", 0o1777), ("etc", 0o755), ("etc/ssl", 0o755), ("etc/ssl/certs", 0o755),
                           ("usr", 0o755), ("usr/bin", 0o755)]:
            add(tar, release, name, mode)
        add(tar, release, "etc/passwd", 0o644, PASSWD.encode())
        add(tar, release, "etc/group", 0o644, GROUP.encode())
        add(tar, release, "etc/ssl/certs/ca-certificates.crt", 0o644, certificates.encode())
        add(tar, release, "usr/bin/larder", 0o755, command.read_bytes())
    platform = {"architecture": ARCHITECTURES[architecture], "os": "linux"}
    layer = blob(blobs, gzip.compress(raw.getvalue(), 9, mtime=0), KIND + "layer.v1.tar+gzip")
    labels = {
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.title": "larder",
        "org.opencontainers.image.version": release.version,
    }
    config = {
        **platform,
        "created": moment(release),
        "config": {
            "Entrypoint": ["/usr/bin/larder"], "Cmd": ["--help"], "User": f"{USER}:{USER}",
            "Env": ["PATH=/usr/bin"], "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(raw.getvalue()).hexdigest()]},
        "history": [{"created": moment(release), "created_by": "scripts/release"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": KIND + "manifest.v1+json",
        "config": blob(blobs, pack(config), KIND + "config.v1+json"),
        "layers": [layer],
    }
    return {**blob(blobs, pack(manifest), KIND + "manifest.v1+json"), "platform": platform}


def pack(value):
    """A document's bytes."""
    return json.dumps(value, sort_keys=True).encode()


def blob(blobs, content, kind):
    """Keeps a content under its digest; returns its description."""
    name = hashlib.sha256(content).hexdigest()
    blobs[name] = content
    return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(content)}


def add(tar, release, name, mode, content=None):
    """A file or a directory of root's."""
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = mode, release.epoch
    if content is None:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    else:
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
