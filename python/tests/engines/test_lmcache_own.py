"""LMCache's own tests of its adapters and controllers, from its source distribution, with
`LarderL2Adapter` in place of the mock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Where `python/tests/prepare` leaves them.
SOURCE = Path(sys.prefix).parent / "lmcache-0.5.6"

TESTS = (
    "test_mock_l2_adapter",
    "test_l2_adapter_base",
    "test_store_controller",
    "test_prefetch_controller",
    "test_runtime_adapters",
    "test_report_status",
    "test_storage_manager_l2_keys",
    "test_cache_salt_l2_eviction",
    "test_distributed_storage_manager",
)

#: Tests that no adapter over a store passes, and why.
LEFT_OUT = {
    "test_store_completion_is_delayed_by_bandwidth": "the mock's simulated bandwidth",
    "test_remove_waits_for_in_flight_load": "the mock's simulated bandwidth, which keeps a load under way",
    "test_requests_during_drain_release_their_admission_slot": "the mock's simulated bandwidth, which keeps a load under way",
    "test_stop_releases_in_flight_locks": "the mock's simulated bandwidth, which keeps a load under way",
    # LMCache asks for a result as soon as the eventfd is readable. The listeners are called then.
    "test_listener_notified_on_load": "asks for the notice without asking for the result",
    "test_listener_load_skips_missing_keys": "asks for the notice without asking for the result",
}


@pytest.mark.skipif(not SOURCE.is_dir(), reason=f"LMCache's own tests are not at {SOURCE}")
def test_lmcaches_own_tests_pass():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "support.lmcache_own",
        "-o",
        "log_cli=false",
        "-q",
        "--tb=short",
        "-W",
        "ignore",
    ]
    command += ["-p", "no:cacheprovider", "-k", " and ".join(f"not {name}" for name in LEFT_OUT)]
    command += [f"tests/v1/distributed/{name}.py" for name in TESTS]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }
    done = subprocess.run(
        command,
        cwd=SOURCE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    # They skip as a whole where LMCache finds no device.
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout.splitlines()[-1]
