"""A real language model, SmolLM2-135M-Instruct, and prompts about the pages of our own documentation.

Prompts are token ids: a document is cut at a number of tokens, and the answers of a chat are part of its next prompt token by token.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

#: Tokens of a prompt with its answer.
CONTEXT = 8192
DOCUMENT_TOKENS = 6000
#: Of two documents that share a beginning.
SHARED_TOKENS = 4000

#: About the first tokens of docs/operations.md.
QUESTIONS = (
    "Which command makes a new store?",
    "What does `larder verify --repair` do?",
    "Which Linux kernel is required?",
    "How is the service started by systemd?",
    "What do the exit codes of a command mean?",
)

#: The turns of a chat about a document.
TURNS = (
    "What is this text about?",
    "Name three commands that it mentions.",
    "What must an operator do before creating a store?",
    "Explain the word `volume` in one sentence.",
    "What happens when a page is damaged?",
    "Which of these things would you do first, and why?",
    "Summarise the text in two sentences.",
    "Which file systems are mentioned?",
    "Write a short warning for a new operator.",
    "Thank you. What was my first question?",
)


def model_folder() -> Path | None:
    """The model's Hugging Face folder, as `python/tests/prepare` writes it; none where it could not be fetched."""
    named = os.environ.get("LARDER_PYTHON_CACHE")
    # An environment lies at CACHE/venv or CACHE/ENGINE/venv.
    caches = [Path(named)] if named else list(Path(sys.prefix).parents[:2])
    folders = (cache / "smollm2/model" for cache in caches)
    # The file that is written last.
    return next((folder for folder in folders if (folder / "config.json").exists()), None)


def documents() -> dict[str, str]:
    """The text of each page of the documentation, by its name without `.md`."""
    return {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}


@dataclass
class Chat:
    """A conversation so far."""

    words: Words
    ids: list[int] = field(default_factory=list)

    def ask(self, text: str, document: list[int] | None = None) -> list[int]:
        """The prompt of the next turn: the conversation, a document if the turn has one, and a request."""
        head, tail = self.words.frame(is_first=not self.ids)
        self.ids = [*self.ids, *head, *(document or []), *self.words.encode(("\n\n" if document else "") + text + tail)]
        return self.ids

    def answered(self, ids: list[int]) -> None:
        """Takes an answer into the conversation, to the end of its message."""
        self.ids = [*self.ids, *self.words.message(ids), *self.words.encode("<|im_end|>\n")]


class Words:
    """The model's tokenizer and chat template, and prompts made by them."""

    def __init__(self, folder: Path):
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.pages = {name: self.encode(text) for name, text in documents().items()}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def message(self, ids: list[int]) -> list[int]:
        """The tokens of an answer before the end of its message."""
        end = self.tokenizer.eos_token_id
        return ids[: ids.index(end)] if end in ids else ids

    def say(self, ids: list[int]) -> str:
        return self.tokenizer.decode(self.message(ids))

    def frame(self, is_first: bool) -> tuple[list[int], str]:
        """Around a user's message: the tokens before it, and the text behind it."""
        mark = "\N{SECTION SIGN}"
        message = [{"role": "user", "content": mark}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        head, tail = text.split(mark)
        return self.encode(head if is_first else head[head.rindex("<|im_start|>") :]), tail

    def document(self, name: str, tokens: int = DOCUMENT_TOKENS) -> list[int]:
        """A document of this many tokens: a page, and as many of the pages behind it as it takes."""
        names = list(self.pages)
        at = names.index(name)
        ids = [one for page in (*names[at:], *names[:at]) for one in self.pages[page]]
        assert len(ids) >= tokens
        return ids[:tokens]

    def prompt(self, document: list[int], question: str) -> list[int]:
        """A question about a document, which comes first: prompts about one document begin with the same tokens."""
        return Chat(self).ask(question, document)

    def questions(self) -> list[list[int]]:
        """Five questions about one document."""
        document = self.document("operations")
        return [self.prompt(document, question) for question in QUESTIONS]

    def chat(self, tokens: int = 2000) -> tuple[Chat, list[int], tuple[str, ...]]:
        """A new chat, the document of its first turn, and its ten requests. Ten answers of 128 tokens fit in the context."""
        return Chat(self), self.document("operations", tokens), TURNS

    def siblings(self) -> list[list[int]]:
        """Two documents of one length that share their first SHARED_TOKENS."""
        head = self.document("operations", SHARED_TOKENS)
        rest = DOCUMENT_TOKENS - SHARED_TOKENS
        return [self.prompt([*head, *self.document(name, rest)], QUESTIONS[0]) for name in ("remote", "retention")]

    def library(self) -> list[list[int]]:
        """Four documents, 24,000 tokens in all: more than L1 and L2 together, where a test makes these small."""
        return [
            self.prompt(self.document(name), "What is this text about?")
            for name in ("design", "performance", "runbook", "sglang")
        ]
