"""A server of SeaweedFS with a bucket. The program is the `weed` in `LARDER_WEED`, or in the cache where tests/run installs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

BUCKET = "kvpages"

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SKSKSKSK", "AWS_REGION": "us-east-1"}

#: SeaweedFS adds this to each port, for gRPC.
TWIN = 10_000

#: Seconds after which a start has failed.
PATIENCE = 120


def program() -> Path | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = Path(os.environ.get("LARDER_PYTHON_CACHE") or cache / "larder/python")
    weed = Path(os.environ.get("LARDER_WEED") or place / "seaweedfs/venv/bin/weed")
    return weed if weed.exists() else None


def port() -> int:
    """A port that is free, as is its twin."""
    while True:
        with socket.socket() as one, socket.socket() as twin:
            one.bind(("127.0.0.1", 0))
            found = one.getsockname()[1]
            try:
                twin.bind(("127.0.0.1", found + TWIN))
            except (OSError, OverflowError):
                continue
            return found


class Server:
    """Runs until `stop`."""

    def __init__(self, weed: Path, directory: Path):
        self.weed, self.directory = weed, directory
        identity = {"name": "larder", "actions": ["Admin", "Read", "Write", "List"]}
        keys = {"accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"], "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
        (directory / "s3.json").write_text(json.dumps({"identities": [identity | {"credentials": [keys]}]}))
        (directory / "data").mkdir()
        s3, self.master, volume, self.filer = port(), port(), port(), port()
        self.endpoint = f"http://127.0.0.1:{s3}"
        command = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data", "-filer", "-s3", "-s3.config=s3.json"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=16"]
        command += [f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-master.port={self.master}", f"-volume.port={volume}", f"-filer.port={self.filer}"]
        with open(directory / "log", "wb") as log:
            self.process = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE
        while not self.makes_bucket():
            assert self.process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < until, "SeaweedFS does not answer"

    def makes_bucket(self) -> bool:
        """Whether the bucket is there."""
        shell = [self.weed, "shell", f"-master=127.0.0.1:{self.master}", f"-filer=127.0.0.1:{self.filer}"]
        words = f"s3.bucket.create -name {BUCKET}\ns3.bucket.list\nexit\n"
        done = subprocess.run(shell, cwd=self.directory, input=words, capture_output=True, text=True, check=False)
        return any(line.split()[:1] == [BUCKET] for line in done.stdout.splitlines())

    def makes_remote(self, prefix: str) -> None:
        """Puts the mark of a remote below a prefix, by the filer: an object below `v1/`."""
        mark = f"http://127.0.0.1:{self.filer}/buckets/{BUCKET}/{prefix}/v1/mark"
        with urllib.request.urlopen(urllib.request.Request(mark, data=b"a test", method="PUT"), timeout=PATIENCE):
            pass

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
