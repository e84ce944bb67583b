"""Proofs of a release's files, on roots of Debian that have nothing of the build."""

import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from .base import Absent, Release, cache, needs, output, run
from .bucket import Bucket
from .builds import GLIBC
from .papers import spoilt

#: Bytes at most, by the kind of a file. The charts of `top` and `report` are 1.6 MB of a command.
LARGEST = {".whl": 15_000_000, "linux-x86_64": 17_000_000, "linux-aarch64": 17_000_000, ".deb": 15_000_000, ".tar.gz": 30_000_000}
LAYER_BYTES_MAX = 20_000_000
#: Debian's releases, with the packages of each root.
ROOTS = {"bullseye": [], "bookworm": ["python3", "python3-venv", "adduser"]}
SIZE = ["--size", "256MiB"]
#: A store's first hit, in Python.
FIRST_HIT = """
import hashlib, importlib, sys
module = importlib.import_module(sys.argv[2])
data = bytes(range(256)) * 256 * 8
keys = b"".join(hashlib.sha256(b"page %d" % number).digest() for number in range(8))
with module.Store.attach(sys.argv[1], size="256MiB") as store:
    pages = store.namespace(model="m", weights="w", dtype="uint8", layout="rows", page_tokens=16, parts=[65536])
    assert max(pages.put(keys, data)) <= module.Status.DUPLICATE
    into = bytearray(len(data))
    assert pages.get(keys, into) == bytes(8) and into == data
print("hit")
"""


def everything(out, steps):
    """All proofs of the files in a directory."""
    release = Release(Path(__file__).resolve().parent.parent.parent, out, out, 0, "")
    assert (out / "SHA256SUMS").is_file(), f"{out} has no SHA256SUMS"
    if steps.step("checksums", checksums, out) is None:
        # A spoilt file is not started.
        return
    steps.step("sizes", sizes, out)
    for wheel in sorted(out.glob("*.whl")):
        steps.step(f"symbols of {wheel.name}", symbols, release, wheel)
    native = found(out, f"*-linux-{os.uname().machine}")
    for name in ROOTS:
        steps.step(f"command on {name}", on_root, name, native)
    steps.step("command without /proc and /dev", without_proc, native)
    steps.step("wheel on bookworm", wheel_on_root, found(out, f"*_{os.uname().machine}.whl"))
    steps.step("package on bookworm", deb_on_root, found(out, "*_amd64.deb"))
    steps.step("image", in_container, out, native)
    steps.step("aarch64", emulated, found(out, "*-linux-aarch64"), native)


def found(out, pattern):
    """A file, or `None`."""
    return next(iter(sorted(out.glob(pattern))), None)


def given(path, what):
    """A file that a step needs."""
    if path is None:
        raise Absent(f"{what} was not made")
    return path


def checksums(out):
    """All files are as listed, and none is missing."""
    wrong = spoilt(out)
    assert not wrong, "not as SHA256SUMS states: " + ", ".join(wrong)
    return True


def sizes(out):
    """No file is larger than its kind may be."""
    for path in sorted(out.iterdir()):
        for ending, most in LARGEST.items():
            if path.name.endswith(ending):
                print(f"{path.stat().st_size / (1 << 20):6.2f} MiB  {path.name}")
                assert path.stat().st_size <= most, f"{path.name} has {path.stat().st_size} bytes, at most {most}"


def symbols(release, wheel):
    """The wheel needs no later C library and no private part of Python."""
    shown = json.loads(output(release.tools / "auditwheel", "show", "--json", wheel))
    found = re.match(r"manylinux_2_(\d+)_", shown["sym_tag"])
    assert found and int(found[1]) <= 28 and GLIBC in wheel.name, shown
    assert not shown["external_libs"], shown
    run(release.tools / "abi3audit", "--strict", wheel)
    run(release.tools / "check-wheel-contents", wheel)


def root_of(name):
    """A root of Debian, made once."""
    place = cache() / "roots" / name
    if not (place / "made").exists():
        tool = needs("debootstrap", "debootstrap")
        if os.geteuid() != 0:
            raise Absent("a root of Debian is made and entered by root alone")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        include = [f"--include={','.join(ROOTS[name])}"] if ROOTS[name] else []
        try:
            run(tool, "--variant=minbase", *include, name, place, stdout=subprocess.DEVNULL)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(place, ignore_errors=True)
            raise Absent(f"Debian's {name} cannot be fetched") from error
        (place / "made").touch()
    return place


@contextmanager
def entered(root):
    """A copy of a root, with /proc, which is thrown away. debootstrap has made its few devices."""
    with tempfile.TemporaryDirectory(dir=cache(), ignore_cleanup_errors=True) as name:
        copy = Path(name) / "root"
        run("cp", "-a", "--reflink=auto", root, copy)
        run("mount", "-t", "proc", "proc", copy / "proc")
        try:
            yield copy
        finally:
            run("umount", "--lazy", copy / "proc")


def within(root, *command, **options):
    """Runs a command in a root, with nothing of this environment."""
    return run("env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8", "chroot", root, *command, **options)


def on_root(name, native):
    """The command by itself: a demo, and a server with a client."""
    given(native, "the command")
    with entered(root_of(name)) as root:
        shutil.copy2(native, root / "usr/bin/larder")
        within(root, "larder", "demo", "--dir", "/tmp")
        served(root)


def served(root):
    """A store that one process serves and another one uses."""
    load = ["--page-bytes", "64KiB", "--pages", "200"]
    within(root, "larder", "create", "/tmp/other", *SIZE)
    within(root, "larder", "bench", "/tmp/other", "--op", "put", *load)
    within(root, "larder", "bench", "/tmp/other", "--op", "get", *load)
    within(root, "larder", "export", "/tmp/other", "/tmp/archive")
    within(root, "larder", "create", "/tmp/store", *SIZE)
    server = subprocess.Popen(["chroot", str(root), "/usr/bin/larder", "serve", "/tmp/store"])
    try:
        until(lambda: within(root, "larder", "stat", "/tmp/store", "--check", check=False).returncode == 0, "served")
        within(root, "larder", "import", "/tmp/store", "/tmp/archive")
        within(root, "larder", "verify", "/tmp/store", "--online")
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0, "the server did not end in order"


def until(holds, what, seconds=60):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not {what} after {seconds} s"
        time.sleep(0.2)


def without_proc(native):
    """In a directory with the binary alone, each command says so in one sentence."""
    given(native, "the command")
    if os.geteuid() != 0:
        raise Absent("another root directory is entered by root alone")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copy2(native, root / "larder")
        said = output("chroot", root, "/larder", "--help")
        assert output("chroot", root, "/larder", "--version").startswith("larder ")
        names = re.findall(r"^  ([a-z]+) ", said, re.M)
        commands = {"create": ["s", *SIZE], "demo": [], "doctor": [], "serve": ["s"], "stat": ["s"], "verify": ["s"],
                    "inspect": ["s"], "bench": ["s", "--op", "put"], "exporter": ["s"], "import": ["s", "a"], "export": ["s", "a"]}
        assert set(commands) <= set(names), names
        lacks(root, commands, "/proc is not mounted")
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/stat").touch()
        lacks(root, commands, "/dev has no")


def lacks(root, commands, sentence):
    """Each command ends with this sentence and nothing else."""
    for name, words in commands.items():
        ended = subprocess.run(["chroot", str(root), "/larder", name, *words], capture_output=True, text=True)
        one = ended.stderr.count("\n") == 1 and ended.stderr.startswith(f"larder: {sentence}")
        assert ended.returncode == 3 and one and not ended.stdout, f"{name}: {ended.returncode}: {ended.stderr}"


def wheel_on_root(wheel):
    """Import and first hit, where there is no Rust."""
    given(wheel, "the wheel")
    module = top_module(wheel)
    with entered(root_of("bookworm")) as root:
        shutil.copy2(wheel, root / "tmp")
        within(root, "python3", "-m", "venv", "/tmp/venv")
        within(root, "/tmp/venv/bin/pip", "install", "--quiet", "--no-index", f"/tmp/{wheel.name}")
        (root / "tmp/first_hit.py").write_text(FIRST_HIT)
        (root / "tmp/stores").mkdir()
        said = within(root, "/tmp/venv/bin/python", "/tmp/first_hit.py", "/tmp/stores", module,
                      stdout=subprocess.PIPE, text=True).stdout
        assert said == "hit\n", said
        began = time.monotonic()
        within(root, "/tmp/venv/bin/larder", "demo", "--dir", "/tmp")
        print(f"demo from the wheel: {time.monotonic() - began:.1f} s")


def top_module(wheel):
    """The module that a wheel installs."""
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    (module,) = (name for name in names if not name.endswith((".dist-info", ".data", ".libs")))
    return module


def deb_on_root(deb):
    """The package installs, and its units name installed files."""
    given(deb, "the package")
    with entered(root_of("bookworm")) as root:
        shutil.copy2(deb, root / "tmp")
        within(root, "dpkg", "--install", f"/tmp/{deb.name}")
        within(root, "larder", "--version")
        within(root, "id", "larder")
        for unit in ("larder@.service", "larder-exporter@.service"):
            text = (root / "usr/lib/systemd/system" / unit).read_text()
            assert "ExecStart=/usr/bin/larder " in text and "/usr/local" not in text, unit
    if shutil.which("lintian"):
        run("lintian", "--fail-on", "error", "--allow-root", deb)


def in_container(out, native):
    """The image, started by an OCI runtime as a numeric user without a shell."""
    archive = given(found(out, "*-image.tar"), "the image")
    skopeo, umoci, runc = needs("skopeo", "skopeo"), needs("umoci", "umoci"), needs("runc", "runc")
    with tempfile.TemporaryDirectory(dir=cache()) as name:
        home = Path(name)
        with tarfile.open(archive) as tar:
            tar.extractall(home / "oci", filter="data")
        for layer in (home / "oci/blobs/sha256").iterdir():
            assert layer.stat().st_size <= LAYER_BYTES_MAX, f"a blob of the image has {layer.stat().st_size} bytes"
        for architecture in ("amd64", "arm64"):
            words = ["--override-arch", architecture, "inspect", f"oci:{home / 'oci'}"]
            assert json.loads(output(skopeo, *words))["Architecture"] == architecture
        run(skopeo, "copy", f"oci:{home / 'oci'}", f"oci:{home / 'one'}:larder")
        run(umoci, "unpack", "--image", f"{home / 'one'}:larder", home / "bundle")
        store = home / "store"
        store.mkdir()
        with Bucket(home) as bucket:
            contained(runc, home, store, bucket)


def contained(runc, home, store, bucket):
    """Creation, service, probes, and a remote over https with a private authority."""
    container = Container(runc, home / "bundle", [(store, "/larder"), (bucket.certificates, "/authority")])
    at, group = "/larder/larder.store", "7000"
    for _ in range(2):
        container.run(["create", at, "--if-absent", *SIZE, "--group", group], user=0)
    found = store.stat()
    assert (found.st_mode & 0o7777, found.st_gid) == (0o2770, 7000), oct(found.st_mode)
    keys = ["remote", "key", "/larder/key"]
    container.run(keys)
    container.run(["bench", at, "--op", "put", "--page-bytes", "64KiB", "--pages", "64"])
    with container.started(["serve", at, "--group", group]):
        until(lambda: container.enter(["stat", at, "--check"]).returncode == 0, "served")
        assert container.enter(["stat", at, "--check", "--alive"]).returncode == 0
        assert container.enter(["verify", at, "--online"]).returncode == 0
    assert container.run(["stat", at, "--check", "--alive"], check=False).returncode == 3
    url = ["s3://bucket/larder", "--endpoint", bucket.endpoint, "--ca-file", "/authority/authority.pem"]
    sealed = ["--key-file", "/larder/key"]
    container.run(["remote", "push", at, *url, *sealed, "--new", "--run-tokens", "1"])
    container.run(["create", "/larder/second", *SIZE])
    container.run(["remote", "pull", "/larder/second", *url, *sealed])


class Container:
    """Containers of one bundle, in the network of this machine."""

    def __init__(self, runc, bundle, mounts):
        self.runc, self.bundle, self.number = runc, bundle, 0
        path = bundle / "config.json"
        self.config = json.loads(path.read_text())
        linux = self.config["linux"]
        linux.pop("resources", None)
        linux["namespaces"] = [space for space in linux["namespaces"] if space["type"] not in ("network", "cgroup")]
        self.config["mounts"] = [mount for mount in self.config["mounts"] if mount["type"] != "cgroup"]
        for source, to in mounts:
            options = ["rbind", "rw"]
            self.config["mounts"].append({"destination": to, "type": "bind", "source": str(source), "options": options})
        self.config["process"]["terminal"] = False
        self.config["process"]["env"] += ["AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret", "AWS_REGION=us-east-1"]
        self.config["root"]["readonly"] = True

    def words(self, words, user):
        """Writes the configuration of the next container; returns the command that starts it."""
        process = self.config["process"]
        process["args"] = ["/usr/bin/larder", *words]
        process["user"] = {"uid": user, "gid": 7000, "additionalGids": [7000]}
        kept = ["CAP_CHOWN", "CAP_FOWNER"] if user == 0 else []
        process["capabilities"] = {kind: kept for kind in ("bounding", "effective", "permitted")}
        (self.bundle / "config.json").write_text(json.dumps(self.config))
        self.number += 1
        return [self.runc, "run", "--bundle", str(self.bundle), self.name()]

    def name(self):
        return f"larder-check-{os.getpid()}-{self.number}"

    def run(self, words, user=1000, check=True):
        """Runs a command in a new container."""
        return run(*self.words(words, user), check=check)

    def enter(self, words):
        """Runs a command in the container that runs."""
        command = [self.runc, "exec", "--user", "1000:7000", self.name(), "/usr/bin/larder", *words]
        return run(*command, check=False)

    @contextmanager
    def started(self, words):
        """A container that runs, and ends in order."""
        server = subprocess.Popen(self.words(words, 1000))
        try:
            yield
        finally:
            run(self.runc, "kill", self.name(), "TERM", check=False)
            assert server.wait(timeout=60) == 0, "the container did not end in order"


def emulated(foreign, native):
    """The command of aarch64 under an emulator, and its store read here."""
    given(foreign, "the command for aarch64")
    emulator = needs("qemu-aarch64-static", "qemu-user-static")
    with tempfile.TemporaryDirectory() as name:
        store = str(Path(name) / "store")
        load = ["--page-bytes", "64KiB", "--pages", "64"]
        run(emulator, foreign, "create", store, *SIZE)
        run(emulator, foreign, "bench", store, "--op", "put", *load)
        run(emulator, foreign, "bench", store, "--op", "get", *load)
        run(emulator, foreign, "verify", store, "--deep")
        if native is not None:
            run(native, "verify", store, "--deep")
