"""Situations of an engine that answers in words, the same for each engine: a real model reads pages
of our documentation, and its KV comes from the store.

Right is an answer from L3 with the tokens and the log-probabilities, bit by bit, of an engine
without a store whose own prefix cache holds the same number of tokens of the prompt: a prefill in
two pieces rounds otherwise than in one. Answers that were computed as a whole are printed beside.

A test module imports all of this and defines `site`, a fixture of the module with a `Site`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from started import flip_all, same
from support import real

#: Tokens of an answer.
ANSWER = 32

#: Blocks of 32 tokens of an engine that computes all prompts, and of one that reads them: the four
#: documents of the library exceed that and the tier of CPU memory together.
LARGE, SMALL = 1400, 270

#: Prompts from this length on must come from L3 with this share of their whole units.
LONG, SHARE = 4096, 0.95


@dataclass
class Known:
    """A prompt, and its answer when it was computed in an engine without a store."""

    name: str
    ids: list[int]
    computed: dict


@dataclass
class Scene:
    site: object
    words: real.Words
    #: Computes, without a store.
    plain: object = None
    #: On the store.
    first: object = None
    second: object = None
    knowns: list[Known] = field(default_factory=list)
    #: By name: the right answers of the engine without a store.
    rights: dict[str, dict] = field(default_factory=dict)

    def named(self, kind):
        return [known for known in self.knowns if known.name.startswith(kind)]

    def right(self, known, cached):
        """The answer of the engine without a store, on so many tokens in its own prefix cache. It
        computes anew what is behind them.
        """
        if known.name not in self.rights:
            self.plain.keep(known.ids, cached)
            self.rights[known.name] = self.plain.answer(known.ids, ANSWER)
        answer = self.rights[known.name]
        assert answer["cached"] == cached, (known.name, answer["cached"], cached)
        return answer


@pytest.fixture(scope="module")
def words():
    folder = real.model_folder()
    if folder is None:
        pytest.skip("the real model is not in the cache: python/tests/prepare fetches it")
    return real.Words(folder)


@pytest.fixture(scope="module")
def scene(site, words):
    yield Scene(site, words)
    site.close()


@pytest.fixture(scope="module")
def say(request):
    """Writes a line into the report, also of tests that pass."""
    plugin = request.config.pluginmanager.getplugin
    reporter, capture = plugin("terminalreporter"), plugin("capturemanager")

    def write(*columns):
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line("  ".join(map(str, columns)))

    return write


def show(say, scene, known, cached, answer):
    text = scene.words.say(answer["tokens"]).replace("\n", " ")
    found = f"{cached:>4} of {len(known.ids)}"
    say(f"{known.name:12}", found, f"{answer['seconds']:7.2f} s", repr(text))


def at_once(*calls):
    """Calls of engines that are processes of their own: their starts take long."""
    with ThreadPoolExecutor() as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def play(engine, words):
    """All prompts in their order, with the answers. The chat's are part of its next turns."""
    made = []

    def ask(name, ids):
        made.append(Known(name, list(ids), engine.answer(ids, ANSWER)))
        engine.settle(ids)
        return made[-1].computed["tokens"]

    for number, ids in enumerate(words.questions(), 1):
        ask(f"question {number}", ids)
    chat, document, turns = words.chat()
    for number, turn in enumerate(turns, 1):
        chat.answered(ask(f"turn {number}", chat.ask(turn, document if number == 1 else None)))
    for number, ids in enumerate(words.siblings(), 1):
        ask(f"sibling {number}", ids)
    for number, ids in enumerate(words.library(), 1):
        ask(f"library {number}", ids)
    return made


def whole(site, known):
    """Tokens in the whole units of a prompt, whose last token is always computed."""
    return (len(known.ids) - 1) // site.UNIT * site.UNIT


def test_a_store_does_not_change_computed_answers(scene, words, say):
    site = scene.site
    scene.plain, scene.first = at_once(
        lambda: site.start("plain", blocks=LARGE, has_store=False),
        lambda: site.start("first", blocks=LARGE),
    )
    scene.knowns, stored = at_once(
        lambda: play(scene.plain, words), lambda: play(scene.first, words)
    )
    assert [known.ids for known in stored] == [known.ids for known in scene.knowns]
    assert same(
        [known.computed for known in stored], [known.computed for known in scene.knowns]
    )
    say("computed, on what the prompts before it left in the engine's own prefix cache:")
    for known in scene.knowns:
        show(say, scene, known, known.computed["cached"], known.computed)


def test_words_from_l3_after_sigkill_during_stores(scene, words, say):
    site = scene.site
    document = words.document("json", real.DOCUMENT_TOKENS // 2)
    ids = words.prompt(document, "What is this text about?")
    cut = Known("cut off", ids, scene.plain.answer(ids, ANSWER))
    scene.first.killed(ids)
    scene.first, scene.second = at_once(
        lambda: site.start("third", blocks=SMALL), lambda: site.start("second", blocks=SMALL)
    )
    assert sorted([scene.first.part(), scene.second.part()]) == ["client", "owner"]
    say("from L3 after SIGKILL and a restart:")
    # The longest first: the engine without a store keeps fewer tokens each time, so they have the
    # bytes of before. A document of the library comes again when the others have displaced it.
    longest = sorted(scene.knowns, key=lambda known: len(known.ids), reverse=True)
    for known in [*longest, scene.named("library")[0], cut]:
        scene.first.forget()
        before = scene.first.loaded()
        answer = scene.first.answer(known.ids, ANSWER)
        read = (scene.first.loaded() - before) * site.UNIT
        show(say, scene, known, answer["cached"], answer)
        assert answer["cached"] % site.UNIT == 0
        if known is not cut and len(known.ids) >= LONG:
            assert answer["cached"] >= SHARE * whole(site, known)
        if known.name.startswith("library"):
            assert read >= SHARE * whole(site, known)
        assert same([answer], [scene.right(known, answer["cached"])]), known.name
    assert scene.first.damaged() == 0


def test_words_beside_a_second_engine(scene, say):
    say("from L3 beside another engine on the store:")
    for known in (scene.named("question")[1], scene.named("turn")[-1]):
        scene.second.forget()
        answer = scene.second.answer(known.ids, ANSWER)
        show(say, scene, known, answer["cached"], answer)
        assert answer["cached"] == whole(scene.site, known)
        assert same([answer], [scene.right(known, answer["cached"])])


def test_spoilt_kv_changes_the_words(scene, say):
    """The control: KV is changed in the engine after it has been loaded from L3."""
    known = scene.named("question")[1]
    right = scene.second.answer(known.ids, ANSWER)
    scene.second.damage(known.ids)
    wrong = scene.second.answer(known.ids, ANSWER)
    say("before and after a change of the KV in the engine:")
    for answer in (right, wrong):
        show(say, scene, known, answer["cached"], answer)
        assert answer["cached"] >= whole(scene.site, known)
    assert wrong["tokens"] != right["tokens"]


def test_no_byte_of_a_spoilt_store_is_used(scene, say):
    """A byte of each page of the store is changed: what was in it is computed."""
    scene.first.kill()
    scene.second.kill()
    (store,) = Path(scene.site.place).rglob("*.store")
    assert flip_all(store) > 0
    scene.first = scene.site.start("spoilt", blocks=SMALL)
    knowns = [*scene.named("question")[:2], scene.named("turn")[0]]
    say("computed, since each page of the store is spoilt:")
    for known in knowns:
        answer = scene.first.answer(known.ids, ANSWER)
        show(say, scene, known, answer["cached"], answer)
        assert answer["cached"] == known.computed["cached"]
        assert same([answer], [known.computed])
    assert scene.first.loaded() == 0
