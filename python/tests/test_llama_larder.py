"""examples/llama-larder in front of a fake of llama-server: `engines/test_llama_server.py` has the real one."""

import hashlib
import struct

import pytest
from support.llama import Proxy, complete, end_all, gguf, post
from support.llama_fake import Fake


@pytest.fixture(autouse=True)
def ended():
    yield
    end_all()


@pytest.fixture
def model(tmp_path):
    return gguf(tmp_path / "model.gguf", **{"general.architecture": "llama", "general.name": "toy"})


def tokens_of(seed, count):
    return [(seed * 7919 + at * 31) % 30000 for at in range(count)]


def fake(tmp_path, **more):
    (tmp_path / "slots").mkdir(exist_ok=True)
    return Fake(tmp_path / "slots", **more)


def test_a_prompt_is_restored_after_a_restart_with_the_same_words(tmp_path, model):
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    prompt = tokens_of(1, 1500)
    first = complete(proxy.url, prompt)
    assert first["timings"]["prompt_n"] == 1500
    assert "stored 1503 tokens" in proxy.end()
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    assert complete(proxy.url, prompt)["content"] == first["content"]
    assert server.computed == [1]
    # Another question behind a shared begin.
    other = prompt[:1000] + tokens_of(2, 200)
    computed = complete(fake(tmp_path).url, other)
    assert complete(proxy.url, other)["content"] == computed["content"]
    assert server.computed == [1, 200]
    proxy.end()


def test_a_state_that_a_longer_one_contains_is_deleted(tmp_path, model):
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    tokens = tokens_of(3, 700)
    for _ in range(10):
        words = complete(proxy.url, tokens, 20)["content"].split()
        tokens = [*tokens, *map(int, words), *tokens_of(len(tokens), 100)]
    said = proxy.end()
    stored = [int(line.split()[3]) for line in said.splitlines() if ": stored " in line]
    # A state at 512 new tokens or more, and one at the end.
    assert all(b - a >= 512 for a, b in zip(stored[:-1], stored[1:-1])) and 3 <= len(stored) <= 4, stored
    from larder_kv import Store

    with Store.attach(tmp_path / "store") as store:
        # Pages of 1 MiB: the last state. And an entry of the index for each of its blocks.
        pages = sorted(row.pages for row in store.usage())
        assert pages[-1] == stored[-1] // 64 and pages[0] <= stored[-1] * 2048 // (1 << 20) + 2, (pages, stored)


def test_the_end_of_a_conversation_makes_a_state(tmp_path, model):
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    short = tokens_of(4, 200)
    complete(proxy.url, short)
    complete(proxy.url, tokens_of(5, 200))
    complete(proxy.url, short)
    assert server.computed == [200, 200, 1]
    proxy.end()


def test_flipped_bytes_are_a_miss(tmp_path, model):
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    prompt = tokens_of(6, 1500)
    first = complete(proxy.url, prompt)
    proxy.end()
    store = tmp_path / "store/larder.store"
    bytes_ = bytearray(store.read_bytes())
    at = bytes_.find(hashlib.sha256(struct.pack("<2i", 700, prompt[700])).digest())
    assert at > 0
    with open(store, "r+b") as file:
        file.seek(at)
        file.write(bytes(64))
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    assert complete(proxy.url, prompt)["content"] == first["content"]
    assert server.computed == [1500]
    assert "cannot be read, and is forgotten" in proxy.end()


@pytest.mark.parametrize(("fields", "slots", "why"), [
    ({"general.architecture": "mamba"}, 1, "which was not tried"),
    ({"general.architecture": "llama", "llama.attention.sliding_window": 1024}, 1, "sliding window"),
    ({"general.architecture": "llama"}, 4, "4 slots"),
])
def test_servers_that_are_not_sure_are_passed_through(tmp_path, fields, slots, why):
    server = fake(tmp_path, total_slots=slots)
    proxy = Proxy(tmp_path, server.url, gguf(tmp_path / "model.gguf", **fields))
    for _ in range(2):
        assert complete(proxy.url, tokens_of(1, 600))["content"]
    said = proxy.end()
    assert said.count("passed through uncached") == 1 and why in said
    assert not (tmp_path / "store").exists()


def test_requests_that_are_not_sure_are_passed_through(tmp_path, model):
    server = fake(tmp_path)
    proxy = Proxy(tmp_path, server.url, model)
    for more in ({"n_predict": 4000}, {"cache_prompt": False}, {"image_data": [1]}):
        for _ in range(2):
            assert post(proxy.url, "/completion", {"prompt": tokens_of(1, 600), "n_predict": 1, **more})["content"]
    said = proxy.end()
    assert said.count("passed through uncached") == 2 and ": stored " not in said
