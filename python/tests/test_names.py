"""The distribution `larder` is another project's. It is installed beside `larder-kv`, and both work."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest


def installed_wheel() -> Path:
    """The file that `larder-kv` of this environment was installed from."""
    source = json.loads(metadata.distribution("larder-kv").read_text("direct_url.json") or "{}")
    wheel = Path(unquote(urlparse(source.get("url", "")).path))
    if not wheel.is_file():
        pytest.skip("the wheel that is installed here is not on this machine")
    return wheel


def other_wheel(directory: Path) -> Path:
    """A wheel of a distribution `larder` with a module `larder`."""
    wheel = directory / "larder-0.0.9-py3-none-any.whl"
    about = "larder-0.0.9.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("larder/__init__.py", "other = True\n")
        files.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: larder\nVersion: 0.0.9\n")
        files.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in (*files.namelist(), f"{about}/RECORD")))
    return wheel


@pytest.mark.parametrize("ours_is_first", [True, False])
def test_both_distributions_work(tmp_path, ours_is_first):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    wheels = [installed_wheel(), other_wheel(tmp_path)]
    for wheel in wheels if ours_is_first else reversed(wheels):
        pip = [sys.executable, "-m", "pip", "-q", "--python", venv / "bin/python", "install", "--no-index", "--no-deps"]
        subprocess.run([*pip, wheel], check=True)
    program = (
        "import larder, larder_kv, sys\n"
        "assert larder.other and not hasattr(larder, 'Store')\n"
        "larder_kv.Store.attach(sys.argv[1], size=128 << 20).close()\n"
    )
    subprocess.run([venv / "bin/python", "-I", "-W", "error", "-c", program, tmp_path / "pages"], check=True)
    for command in ([venv / "bin/larder"], [venv / "bin/python", "-m", "larder_kv"]):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["larder", metadata.version("larder-kv")]
