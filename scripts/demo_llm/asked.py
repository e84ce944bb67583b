"""Asks servers of an engine one question, before and after restarts, and writes the figures as JSON.

    python asked.py --engine ENGINE --model MODEL --folder FOLDER --restarts N --device cpu|gpu --out FILE

Run by scripts/demo-llm with the interpreter of the engine's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "python/tests")]

from benching import Trouble, file_system, machine  # noqa: E402
from support import real  # noqa: E402

#: Servers over HTTP.
ENGINES = {"sglang": "words.sglang", "vllm": "demo_llm.vllm_server"}
MODEL = "SmolLM2-135M-Instruct"
#: Tokens of an answer.
ANSWER = 48
#: Tokens of the document of the question before, whose answer loads code. Each server has its own.
BEFORE = 600


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Asking:
    """Servers one after another, and their answers to one prompt, by the name of a row."""

    def __init__(self, engine, words: real.Words):
        self.engine, self.words = engine, words
        self.prompt = words.questions()[0]
        self.starts: list[float] = []
        self.answers: dict[str, list] = {}

    @contextlib.contextmanager
    def server(self, with_store: bool):
        begun = time.monotonic()
        say(f"server {len(self.starts) + 1}, {'with Larder' if with_store else 'without L3'}")
        with self.engine.started(with_store) as running:
            self.starts.append(time.monotonic() - begun)
            pages = self.words.pages["design"]
            at = len(self.starts) * BEFORE % (len(pages) - BEFORE)
            before = self.words.prompt(pages[at : at + BEFORE], "What is this text about?")
            running.ask(before, 2)
            if with_store:
                running.stored(len(before))
            try:
                yield running
            except BaseException:
                # The end of a server is not cut short by a second signal.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                raise

    def ask(self, row: str, running) -> None:
        answer = running.ask(self.prompt, ANSWER)
        self.answers.setdefault(row, []).append(answer)
        read = f"{answer.cached:,} of {len(self.prompt):,} tokens read"
        say(f"  {row}: first token after {answer.seconds:.2f} s, {read}")

    def run(self, restarts: int) -> None:
        with self.server(False) as running:
            self.ask("computed", running)
            self.ask("l1", running)
        with self.server(True) as running:
            self.ask("stored", running)
            running.stored(len(self.prompt))
        for _ in range(restarts):
            with self.server(False) as running:
                self.ask("restarted", running)
            with self.server(True) as running:
                self.ask("l3", running)

    def said(self, answer) -> str:
        return self.words.say(answer.ids).strip()

    def row(self, name: str, answers: list) -> dict[str, object]:
        return {
            "name": name,
            "ttft_seconds": statistics.median(answer.seconds for answer in answers),
            "l3_tokens": min(answer.read for answer in answers),
            "cached_tokens": min(answer.cached for answer in answers),
            "words": self.said(answers[-1]),
        }

    def figures(self) -> dict[str, object]:
        (l1,) = self.answers["l1"]
        return {
            "question": real.QUESTIONS[0],
            "prompt_tokens": len(self.prompt),
            "document_tokens": real.DOCUMENT_TOKENS,
            "restarts": len(self.answers["l3"]),
            "start_seconds": round(statistics.median(self.starts), 1),
            "rows": [self.row(name, answers) for name, answers in self.answers.items()],
            "same_words": all(self.said(answer) == self.said(l1) for answer in self.answers["l3"]),
        }


def version(package: str) -> str:
    """Of an installed package; an engine's build for the CPU has a name of its own."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(f"{package}-cpu")


def gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--engine", "--device"):
        parser.add_argument(name, required=True)
    for name in ("--model", "--folder", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--restarts", type=int, required=True)
    return parser.parse_args()


def main() -> int:
    options = parse()
    module = importlib.import_module(ENGINES[options.engine])
    engine = module.Engine(options.folder, options.model)
    if engine.on_cpu != (options.device == "cpu"):
        raise Trouble(f"{engine.NAME} does not run on the {options.device} here: torch finds {gpu() or 'no GPU'}")
    facts = {
        "date": str(datetime.date.today()),
        "engine": f"{engine.NAME} {version(engine.NAME.lower())}",
        "larder": version("larder-kv"),
        "model": MODEL,
        "machine": machine(),
        "gpu": gpu(),
        "disk": file_system(options.folder),
        # Of others: the servers have not started.
        "load_per_core": round(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 1),
        "replaced": engine.replaced(),
        "settings": engine.settings(),
    }
    asking = Asking(engine, real.Words(options.model))
    asking.run(options.restarts)
    options.out.write_text(json.dumps(facts | asking.figures()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except Trouble as trouble:
        say(f"demo-llm: {trouble}")
        sys.exit(3)
