"""The examples of docs/python.md run."""

from __future__ import annotations

import re
from pathlib import Path

from larder_kv import Status

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_for_python_explains_each_status():
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert rows == [status.name for status in Status]


def test_the_examples_for_python_run(tmp_path):
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        # Tracebacks name the line of the page.
        lines = text[: block.start(1)].count("\n")
        source = "\n" * lines + block[1].replace("/nvme/pages", str(tmp_path / "pages"))
        exec(compile(source, str(DOCS / "python.md"), "exec"), names)
