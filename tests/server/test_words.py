"""A real language model: its answers are words, the same from L3 as from L1.

Four kinds of traffic about our own documentation (`support/real.py`) go through the situations of
a server's life, in this order. A prompt that is computed in two pieces rounds otherwise than in one.
So right is an answer with the tokens and the log-probabilities, bit by bit, of the same request
when L1 had the same number of its tokens. Answers that were computed as a whole are printed beside.
"""

from __future__ import annotations

import concurrent.futures
import threading
from dataclasses import dataclass, field

import pytest
from known import attach, check, is_right, learn, send_until_the_end
from report import LINES
from serving import PAGE_TOKENS, REAL, THREADS, Site, wait_for
from support import real

FOLDER = real.model_folder()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="no real language model: tests/run --server fetches it"
)

#: L1 has room for one document, and L2, which holds what L1 does, for two and a half.
L1_TOKENS = 7680
ARGUMENTS = [*REAL, "--max-total-tokens", L1_TOKENS, "--context-length", real.CONTEXT]

#: At most so many tokens of an answer, which ends at the end of its message.
ASKED = {"sampling_params": {"temperature": 0, "max_new_tokens": 24}}

#: Bytes a second of a slow disk: the pages of a document take several looks at the store.
SLOW = 8 << 20

#: Bits of each number of KV that the control changes: a factor of two, and digits.
BITS = 0x95

#: Bytes of a page by which it is found in the store.
HEAD_BYTES = 64

#: Prompts whose KV is the same when they are computed again, in this order.
AGAIN = ["question 1", "sibling 1", "sibling 2", "document 4"]
#: A prompt of each kind. KV of a chat was decoded in part.
SOME = [*AGAIN, "turn 10"]

#: Prompts of at least so many tokens must come from L3 nearly whole.
LONG_TOKENS = 4096


@dataclass
class Scene:
    site: Site
    words: real.Words
    server: object = None
    known: dict = field(default_factory=dict)
    #: The pages that the store holds at least.
    pages: set = field(default_factory=set)

    def learn(self, name, tokens):
        """Computes a prompt, reads it from L1, and waits until all of that is in the store."""
        known = self.known[name] = learn(self.server, tokens, is_cold=False, **ASKED)
        for answer in (known.computed, known.from_l1):
            # The last token of an answer has no KV.
            self.pages |= page_keys(tokens + answer.tokens[:-1])
        self.server.settle(len(self.pages))
        self.say(f"computed but for {known.computed.cached} tokens", name, known.computed)
        self.say("from L1", name, known.from_l1)

    def say(self, situation, name, answer):
        length = len(self.known[name].tokens)
        where = f"{answer.storage} of {length} tokens from L3, first token after {answer.ttft:.2f} s"
        LINES.append(f"{situation}: {name}: {where}: {self.words.say(answer.tokens)!r}")

    def check(self, server, situation, names):
        """Each prompt comes from L3, whole and right. Returns the answers."""
        answers = {}
        for name in names:
            server.flush()
            answers[name] = check(server, self.known[name])
            self.say(situation, name, answers[name])
        return answers



def page_keys(tokens):
    """The whole pages of these tokens: each is known by all tokens up to its end."""
    return {hash(tuple(tokens[:end])) for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS)}


@pytest.fixture(scope="module")
def scene(library, tmp_path_factory):
    place = tmp_path_factory.mktemp("words")
    # An attach needs a tag.
    site = Site(place, FOLDER, library, size="3GiB", weights_tag="own")
    yield Scene(site, real.Words(FOLDER))
    site.close()


def test_questions_about_a_document(scene):
    scene.server = scene.site.start(ARGUMENTS)
    for number, tokens in enumerate(scene.words.questions(), 1):
        scene.learn(f"question {number}", tokens)
    assert scene.known["question 1"].computed.cached == 0


def test_a_chat_whose_answers_are_written_back(scene):
    chat, document, turns = scene.words.chat()
    for number, text in enumerate(turns, 1):
        tokens = chat.ask(text, document if number == 1 else None)
        before = scene.known.get(f"turn {number - 1}")
        scene.learn(f"turn {number}", tokens)
        known = scene.known[f"turn {number}"]
        if before is not None:
            # The pages of the turn before, and what was decoded in it.
            held = len(before.tokens) + len(before.from_l1.tokens) - 1
            assert known.computed.cached == held // PAGE_TOKENS * PAGE_TOKENS
        chat.answered(known.from_l1.tokens)


def test_two_documents_that_share_a_beginning(scene):
    for number, tokens in enumerate(scene.words.siblings(), 1):
        scene.learn(f"sibling {number}", tokens)
        assert scene.known[f"sibling {number}"].computed.cached >= real.SHARED_TOKENS - PAGE_TOKENS


def test_documents_that_exceed_l1_and_l2(scene):
    names = []
    for number, tokens in enumerate(scene.words.library(), 1):
        names.append(f"document {number}")
        scene.learn(names[-1], tokens)
    for name in names:
        known = scene.known[name]
        answer = known.ask(scene.server)
        scene.say("after three other documents", name, answer)
        # L2 may still have a part of it.
        assert answer.cached == known.whole and answer.storage > 0
        assert is_right(scene.server, answer, known)


def test_spoilt_kv_changes_the_words(scene):
    """The negative control: KV is changed in the pool after it has been loaded from L3."""
    server, known = scene.server, scene.known["question 1"]
    server.flush()
    check(server, known)
    server.ask("spoil", tokens=known.tokens[: known.whole], bits=BITS)
    answer = known.ask(server)
    scene.say("with spoilt KV", "question 1", answer)
    assert (answer.cached, answer.storage) == (known.whole, 0)
    assert scene.words.say(answer.tokens) != scene.words.say(known.from_l1.tokens)
    assert not is_right(server, answer, known)
    server.flush()


def test_after_a_restart(scene):
    scene.server.stop()
    scene.server = scene.site.start(ARGUMENTS, **THREADS)
    answers = scene.check(scene.server, "from L3 after a restart", scene.known)
    long = {name: known for name, known in scene.known.items() if len(known.tokens) >= LONG_TOKENS}
    whole = sum(known.whole for known in long.values())
    read = sum(answers[name].storage for name in long)
    LINES.append(f"{len(long)} prompts of {LONG_TOKENS} tokens or more: {read / whole:.1%} from L3")
    assert read >= 0.95 * whole


def test_beside_a_second_server(scene):
    client = scene.site.start(ARGUMENTS, **THREADS)
    assert {rank["part"] for rank in client.counters()} == {"client"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        beside = pool.submit(scene.check, client, "from L3 in a second server", scene.known)
        scene.check(scene.server, "from L3 beside a second server", SOME)
        beside.result()
    client.stop()


def test_after_sigkill_while_pages_are_written(scene):
    site, server = scene.site, scene.server
    attach(server, weights_tag="later", **THREADS)
    server.flush()
    first, *others = [scene.known[name] for name in AGAIN]
    written = site.pages() + first.whole // PAGE_TOKENS
    server.generate(first.tokens, new=1)
    # Others begin with its pages. A slow disk would drop some, and to compute those rounds otherwise.
    server.settle(written)
    site.flags["SLOW_WRITES"].write_text(str(SLOW))
    prompts = [known.tokens for known in others]
    sender = threading.Thread(target=send_until_the_end, args=(server, prompts))
    sender.start()
    wait_for("pages of others in the store", lambda: site.pages() > written, pause=0)
    server.kill()
    sender.join()
    site.flags["SLOW_WRITES"].unlink()
    scene.server = server = site.start(ARGUMENTS, weights_tag="later")
    found = {name: cold(server, scene.known[name]) for name in AGAIN}
    wanted = sum(scene.known[name].whole for name in AGAIN)
    assert 0 < sum(answer.cached for answer in found.values()) < wanted
    for name, answer in found.items():
        scene.say("after SIGKILL", name, answer)
        assert answer.cached == answer.storage
        assert answer.same(reference(server, scene.known[name], answer.cached))
    attach(server)
    scene.check(server, "from L3 after SIGKILL", SOME)


def cold(server, known):
    """The answer with empty L1 and L2; its KV from L3 is right."""
    server.flush()
    answer = known.ask(server)
    head = answer.cached // PAGE_TOKENS
    assert not head or server.kv(known.tokens[: answer.cached]) == [rank[:head] for rank in known.kv]
    return answer


def reference(server, known, tokens):
    """The answer to the same request of which L1 has this many tokens, and L3 none."""
    for answer in (known.from_l1, known.computed):
        if answer.cached == tokens and answer.storage == 0:
            return answer
    if tokens:
        # Of a shorter prompt no more comes from L3. To compute it would round otherwise.
        attach(server)
        server.flush()
        server.generate(known.tokens[: tokens + 1], new=1)
        head = tokens // PAGE_TOKENS
        assert server.kv(known.tokens[:tokens]) == [rank[:head] for rank in known.kv]
    # A tag of its own: no page is found in L3.
    attach(server, weights_tag=f"none-{abs(hash(tuple(known.tokens)))}")
    if not tokens:
        server.flush()
    answer = known.ask(server)
    assert (answer.cached, answer.storage) == (tokens, 0)
    return answer


def test_a_byte_of_each_page_is_spoilt(scene):
    server, site = scene.server, scene.site
    heads, pages = set(), set()
    for name in SOME:
        known = scene.known[name]
        server.flush()
        check(server, known)
        (said,) = server.ask("heads", tokens=known.tokens[: known.whole], bytes=HEAD_BYTES)
        heads |= {bytes.fromhex(head) for head in said["heads"]}
        pages |= page_keys(known.tokens[: known.whole])
    spoilt = site.spoil_pages(heads)
    assert spoilt >= len(pages)
    found = {name: cold(server, scene.known[name]) for name in SOME}
    assert found[SOME[0]].cached == 0
    assert server.counters()[0]["rank_damaged_pages"] > 0
    for name, answer in found.items():
        scene.say(f"{spoilt} pages spoilt", name, answer)
        # Later prompts may find pages that earlier ones have stored again.
        assert answer.same(reference(server, scene.known[name], answer.cached))
