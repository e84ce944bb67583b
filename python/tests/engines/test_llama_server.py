"""examples/llama-larder in front of the real llama-server."""

import mmap
import struct
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.llama import LLAMA, Llama, Proxy, complete, end_all, post, story  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (LLAMA / "complete").exists(), reason="llama-server is not installed: examples/llama-larder/fetch ~/.cache/larder/llama")


@pytest.fixture(autouse=True)
def ended():
    yield
    end_all()


def test_llama_server_gives_the_words_of_its_own_cached_prompt_ten_times_sooner(tmp_path):
    def timed(url, words):
        began = time.monotonic()
        answer = complete(url, prompt, words)
        return answer, time.monotonic() - began

    llama = Llama(tmp_path / "slots")
    prompt = story(llama.url, 2000)
    _, computed = timed(llama.url, 1)
    own, _ = timed(llama.url, 16)
    llama.end()
    llama = Llama(tmp_path / "slots")
    proxy = Proxy(tmp_path, llama.url, LLAMA / "model.gguf", "1GiB")
    complete(proxy.url, prompt)
    assert "stored" in proxy.end()
    llama.end()
    llama = Llama(tmp_path / "slots")
    proxy = Proxy(tmp_path, llama.url, LLAMA / "model.gguf", "1GiB")
    _, restored = timed(proxy.url, 1)
    again, _ = timed(proxy.url, 16)
    print(f"first word of 2,000 tokens: computed {computed:.2f} s, restored {restored:.2f} s, ratio {computed / restored:.1f}")
    assert again["content"] == own["content"]
    assert again["timings"]["cache_n"] == own["timings"]["cache_n"] == 1999
    assert "restored" in proxy.end()
    llama.end()


def flip(store, wanted, beyond):
    """Flips a byte so far behind each place of these bytes."""
    with open(store, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        places, at = [], content.find(wanted)
        while at >= 0:
            places.append(at + beyond)
            at = content.find(wanted, at + 1)
        for place in places:
            content[place] ^= 0xff
    return len(places)


def test_flipped_bytes_are_computed_anew_with_the_same_words(tmp_path):
    def answered():
        llama = Llama(tmp_path / "slots")
        proxy = Proxy(tmp_path, llama.url, LLAMA / "model.gguf", "1GiB")
        answer = complete(proxy.url, prompt, 16)
        said = proxy.end()
        assert llama.process.poll() is None
        llama.end()
        return answer["content"], answer["timings"]["cache_n"], said

    llama = Llama(tmp_path / "slots")
    prompt = story(llama.url, 1000)
    own = complete(llama.url, prompt, 16)["content"]
    llama.end()
    words, _, said = answered()
    (length,) = (int(line.split()[-2]) for line in said.splitlines() if ": stored " in line)
    assert words == own
    restored = (own, 999)
    tokens = struct.pack("<100i", *prompt[:100])
    places = {
        "a key or value behind the tokens": (tokens, 4 * len(prompt) + 300_001),
        "the tokens": (tokens, 42),
        "the entries of the index": (struct.pack("<Q", length) + bytes(4000), 7),
    }
    for place, (wanted, beyond) in places.items():
        assert answered()[:2] == restored, place
        flipped = flip(tmp_path / "store/larder.store", wanted, beyond)
        words, cached, said = answered()
        print(f"a byte in {place} ({flipped} places): {cached} tokens restored, words {'the same' if words == own else 'OTHER'}")
        assert flipped > 0 and words == own and cached == 0, said
        assert "restored" not in said, said
    assert answered()[:2] == restored


def test_a_chat_of_ten_turns_writes_few_states(tmp_path):
    llama = Llama(tmp_path / "slots")
    proxy = Proxy(tmp_path, llama.url, LLAMA / "model.gguf", "1GiB")
    messages = []
    for turn in range(10):
        question = f"Question {turn}: " + " ".join(f"item {turn * 40 + at} costs {at * 7 % 50};" for at in range(20)) + " which is cheapest?"
        messages.append({"role": "user", "content": question})
        answer = post(proxy.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0})
        messages.append(answer["choices"][0]["message"])
        if turn > 0:
            assert answer["timings"]["cache_n"] > 150 * turn
    said = proxy.end()
    llama.end()
    states = [int(line.split()[-2]) for line in said.splitlines() if ": stored " in line]
    print(f"ten turns: {len(states)} states of {states} bytes, {sum(states) / states[-1]:.2f} times the last one")
    assert len(states) >= 2
