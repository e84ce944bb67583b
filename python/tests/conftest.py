"""Runs the tests of the engine that this environment has: SGLang, on the CPU (see `support.cpu`), vLLM, or LMCache above vLLM."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402

#: By package: the tests that need it alone, in the order in which they identify an environment.
ENGINES = {"lmcache": "test_lmcache*.py", "sglang": None, "vllm": "test_vllm*.py"}

engine = next((name for name in ENGINES if find_spec(name) is not None), "sglang")
if ENGINES[engine] is None:
    import support.cpu  # noqa: F401

    collect_ignore_glob = list(filter(None, ENGINES.values()))
else:
    tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore_glob = [path.name for path in tests if not path.match(ENGINES[engine])]


@pytest.fixture(scope="session")
def bad_disk(tmp_path_factory):
    """See `support.disk`."""
    from support import disk

    return disk.build(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def opened(tmp_path):
    """Makes backends of SGLang, which are closed at the end."""
    from support.backend import make

    made = []

    def open_(*args, path=tmp_path, **more):
        made.append(make(path, *args, **more))
        return made[-1]

    yield open_
    for backend in reversed(made):
        backend.close()


@pytest.fixture(autouse=True)
def log_as_it_is(monkeypatch):
    """pytest takes a line at each logger that does not propagate: it would have our lines twice."""
    monkeypatch.setattr("larder_kv.logs.follow", lambda engine: None)


@pytest.fixture(autouse=True)
def no_stores_left(tmp_path):
    """A store takes its size on disk: none outlives its test, also after a failure."""
    yield
    for store in tmp_path.rglob("*.store"):
        store.unlink()
