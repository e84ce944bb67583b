"""The first page of the documentation for LMCache."""

from __future__ import annotations

from support import start


def test_the_page_for_lmcache(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(100))
    start.doctor_says_what_the_page_does("lmcache", "l2.json", tmp_path, ("/models/llama-3.1-8b", str(model)))
