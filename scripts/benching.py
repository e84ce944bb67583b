"""What the benchmark scripts share: sizes, programs that are run, and what is said of the machine."""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
HUGE_PAGES_FILE = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE_BYTES = 2 * MIB
#: `larder bench` ends with 1 when it found wrong or missing pages: its document has their numbers.
FINDINGS = (0, 1)
UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}


class Trouble(Exception):
    """Something in the environment is in the way; the message says what to do."""


def parse_size(text):
    for unit, unit_bytes in UNITS.items():
        if text.lower().endswith(unit.lower()):
            return int(float(text[: -len(unit)]) * unit_bytes)
    return int(text)


def count(text):
    number = int(text)
    if number < 1:
        raise ValueError("less than 1")
    return number


def human(size):
    for unit in reversed(UNITS):
        if size >= UNITS[unit]:
            number = size / UNITS[unit]
            return f"{number:.0f} {unit}" if number == int(number) else f"{number:.1f} {unit}"
    return f"{size} B"


def run(command, accepted=(0,)):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode not in accepted or not done.stdout and done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise Trouble(f"`{' '.join(str(word) for word in command)}` failed ({done.returncode}): {said}")
    return done.stdout


class HugePages:
    """Reserves so many huge pages for fio's shared memory and gives them back."""

    def __init__(self, pages):
        self.wanted = pages
        self.before = None
        self.reserved = False

    def __enter__(self):
        if not self.wanted:
            return self
        try:
            self.before = HUGE_PAGES_FILE.read_text().strip()
            if int(self.before) < self.wanted:
                HUGE_PAGES_FILE.write_text(str(self.wanted))
            self.reserved = int(HUGE_PAGES_FILE.read_text()) >= self.wanted
        except OSError:
            self.reserved = False
        return self

    def __exit__(self, *_):
        if self.before is not None:
            try:
                HUGE_PAGES_FILE.write_text(self.before)
            except OSError:
                pass


class Larder:
    """`larder bench` on one store."""

    def __init__(self, program, store, batch, key_file=None):
        self.program, self.store, self.batch = program, store, batch
        self.key = ["--key-file", key_file] if key_file else []
        self.bad = 0
        self.disk = ""
        self.page_bytes_of_buffers = 0

    def create(self, size, segment_size, prewrite=True):
        """An empty store in place of what is there, in the same blocks, of which none needs to be written once more."""
        command = [self.program, "create", self.store, "--size", size, "--segment-size", segment_size, "--force", *self.key]
        run(command + ["--prewrite"] if prewrite else command)

    def bench(self, op, page_bytes, work_bytes, *more):
        return [
            self.program, "bench", self.store, "--op", op, "--page-bytes", page_bytes, "--parts", 2,
            "--pages", work_bytes // page_bytes, "--batch", self.batch, "--force", "--json", *self.key, *more,
        ]

    def measure(self, op, page_bytes, work_bytes, *more):
        return self.checked(json.loads(run(self.bench(op, page_bytes, work_bytes, *more), FINDINGS)))

    def checked(self, result):
        self.bad += result["wrong_pages"] + result["pages_missed"] + result["unstored_pages"]
        self.disk = f"{result['disk']} ({result['disk_reason']})" if result["disk_reason"] else result["disk"]
        self.page_bytes_of_buffers = result["memory_page_bytes"]
        return result

    def look_up(self, keys, *more):
        command = [self.program, "bench", self.store, "--op", "exists", "--keys", keys, "--force", "--json", *self.key, *more]
        return self.checked(json.loads(run(command, FINDINGS)))


def machine():
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    memory_bytes = int(memory.split()[1]) * 1024
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_bytes / GIB:.0f} GiB of memory"


def file_system(directory):
    best = ("", "unknown", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        inside = directory == Path(mount) or Path(mount) in directory.parents
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind, device)
    return f"{best[1]} on {best[2]}"


def empty_page_cache():
    """Whether the kernel let go of all that it has cached: for root alone."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def median(results, field):
    return statistics.median(result[field] for result in results)


def interval(ratios):
    """The median, and the ranks that hold it with 95 %: without limits below six ratios, which have none."""
    ordered = sorted(ratios)
    number = len(ordered)
    outside, below = 0.0, 0
    while below < number // 2:
        outside += math.comb(number, below) / 2**number
        if outside > 0.025:
            break
        below += 1
    if below == 0:
        return statistics.median(ordered), 0.0, math.inf
    first = below - 1
    return statistics.median(ordered), ordered[first], ordered[number - 1 - first]


def larder_program(given):
    return given.resolve() if given else built("larder", "-p", "larder")


def example_program(package, name):
    return built(f"examples/{name}", "-p", package, "--example", name)


def built(path, *what):
    """A program of this repository, made by cargo."""
    root = Path(__file__).resolve().parent.parent
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    print(f"building {path}", file=sys.stderr)
    if subprocess.run(["cargo", "build", "--release", "--quiet", *what], cwd=root).returncode != 0:
        raise Trouble(f"{path} does not build; `cargo build --release {' '.join(what)}` says why")
    return (target if target.is_absolute() else root / target) / "release" / path
