"""Remotes beneath the store, by configuration alone: pages of another node, through a directory that both mount, or a bucket."""

from __future__ import annotations

import time

import pytest
from larder_kv.config import Config
from larder_kv.store import Status
from support import weed
from test_store import OK, PAGE, SIZE, content, keys, make, name

#: Pages of a run.
RUN = 4

#: Seconds after which a wait of a test has failed.
PATIENCE = 120


def eventually(what, is_so):
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, f"it never came to this: {what}"
        time.sleep(0.01)


class Node:
    """A node with a store of its own, by the keys of an engine's config."""

    def __init__(self, path, place, **further):
        keys = {"path": str(path), "size": SIZE, "prewrite": False, "l4": f"file://{place}", "l4_unsigned": True}
        # A loaded machine measures a low speed.
        keys |= {"l4_admission": "through", "l4_run_tokens": 64 * RUN, "l4_patience": "60s"}
        self.store = Config.parse(keys | further).attach(PAGE)
        self.pages = name(self.store)

    def read(self, count):
        made = bytearray(count * PAGE)
        return self.pages.get(keys(count), made), made


def objects(place):
    return [path for path in place.rglob("*.run") if path.is_file()]


def test_a_node_that_never_saw_a_prompt_gets_its_pages_and_keeps_them(tmp_path):
    place = tmp_path / "shared"
    (place / "v1").mkdir(parents=True)
    first = Node(tmp_path / "first", place)
    made = content(2 * RUN + 1)
    assert first.pages.put(keys(2 * RUN + 1), made) == OK * (2 * RUN + 1)
    eventually("both runs in the remote", lambda: len(objects(place)) == 2)
    first.store.close()

    second = Node(tmp_path / "second", place)
    assert second.store.part == "owner"
    # The first fetch measures the speed.
    eventually("pages of the remote", lambda: second.pages.longest_prefix(keys(2 * RUN + 1)) == 2 * RUN)
    statuses, read = second.read(2 * RUN)
    assert statuses == OK * 2 * RUN
    assert read == made[: 2 * RUN * PAGE]

    # In one step: the owner writes there meanwhile.
    place.rename(tmp_path / "elsewhere")
    second.store.close()
    again = Node(tmp_path / "second", place)
    statuses, read = again.read(2 * RUN + 1)
    assert statuses == OK * 2 * RUN + bytes([Status.ABSENT])
    assert read[: 2 * RUN * PAGE] == made[: 2 * RUN * PAGE]
    again.store.close()


def test_a_second_process_uses_the_owners_remote(tmp_path):
    place = tmp_path / "shared"
    (place / "v1").mkdir(parents=True)
    first = Node(tmp_path / "first", place)
    made = content(RUN)
    assert first.pages.put(keys(RUN), made) == OK * RUN
    eventually("the run in the remote", lambda: len(objects(place)) == 1)
    first.store.close()
    owner = Node(tmp_path / "second", place)
    client = Node(tmp_path / "second", place)
    assert client.store.part == "client"
    eventually("pages of the remote", lambda: client.pages.longest_prefix(keys(RUN)) == RUN)
    statuses, read = client.read(RUN)
    assert statuses == OK * RUN and read == made
    client.store.close()
    owner.store.close()


def test_several_remotes_are_a_list_and_wrong_keys_are_named(tmp_path):
    places = [tmp_path / "near", tmp_path / "far"]
    for place in places:
        (place / "v1").mkdir(parents=True)
    both = Node(tmp_path / "store", places[0], l4=[f"file://{place}" for place in places])
    assert both.pages.put(keys(RUN), content(RUN)) == OK * RUN
    eventually("the run in both remotes", lambda: all(len(objects(place)) == 1 for place in places))
    both.store.close()
    for wrong, named in [
        ({"l4": "file:///p"}, "l4_key_file"),
        ({"l4_key_file": "k"}, "l4_key_file"),
        ({"l4": 7, "l4_unsigned": True}, "`l4`"),
        ({"l4": "file:///p", "l4_unsigned": True, "l4_bytes_per_day": "1 TB"}, "l4_bytes_per_day"),
    ]:
        with pytest.raises(ValueError, match=named):
            Config.parse({"path": "p", "size": SIZE} | wrong)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server, with the credentials in the environment."""
    program = weed.program()
    if program is None:
        pytest.skip("there is no `weed`: tests/run installs it")
    for variable, value in weed.CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    place = tmp_path / "weed"
    place.mkdir()
    running = weed.Server(program, place)
    yield running
    running.stop()


def test_a_wheel_with_object_stores_shares_pages_through_a_bucket(tmp_path, server):
    server.makes_remote("of-python")
    remote = {"l4": f"s3://{weed.BUCKET}/of-python", "l4_endpoint": server.endpoint, "l4_unsigned": True}
    remote |= {"l4_admission": "through", "l4_run_tokens": 64 * RUN, "l4_patience": "60s", "l4_refresh": "100ms"}
    first = make(tmp_path / "first", l4=remote)
    made = content(2 * RUN)
    assert name(first).put(keys(2 * RUN), made) == OK * 2 * RUN
    # Its listings find the runs that the first node publishes.
    second = make(tmp_path / "second", l4=remote)
    pages = name(second)
    eventually("pages of the bucket", lambda: pages.longest_prefix(keys(2 * RUN)) == 2 * RUN)
    read = bytearray(2 * RUN * PAGE)
    assert pages.get(keys(2 * RUN), read) == OK * 2 * RUN
    assert read == made
    second.close()
    first.close()
