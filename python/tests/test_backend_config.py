"""The configuration of the backend: its keys, and the doctor."""

from __future__ import annotations

import json

import pytest
from support.backend import config, extra, make


@pytest.mark.parametrize(
    "change, name",
    [
        ({"sise": "1GiB"}, "sise"),
        ({"size": "1GB"}, "size"),
        ({"path": 7}, "path"),
        ({"weights_tag": 7}, "weights_tag"),
        ({"timeout": 60}, "timeout"),
        ({"on_error": "ignore"}, "on_error"),
        ({"retry": 0}, "retry"),
        ({"prewrite": "on"}, "prewrite"),
        ({"policy": "mru"}, "policy"),
        ({"transfer": "fast"}, "transfer"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_its_name(tmp_path, change, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        make(tmp_path, extra_config=extra(tmp_path) | change)


def test_a_path_that_cannot_be_used_is_refused_by_its_name(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(RuntimeError, match="`path`"):
        make(file)
    with pytest.raises(RuntimeError, match="`size` is missing"):
        make(tmp_path, extra_config={key: value for key, value in extra(tmp_path).items() if key != "size"})


def test_head_splitting_is_refused_by_its_key(tmp_path):
    wrong = config(tmp_path)
    wrong.should_split_heads = True
    from larder_kv.sglang import LarderHiCache

    with pytest.raises(ValueError, match="`tp_lcm_size`"):
        LarderHiCache(wrong, {})


def test_the_doctor_reads_the_config_as_sglang_does(tmp_path, capfd):
    from larder_kv.__main__ import main

    written = tmp_path / "config.json"
    written.write_text(json.dumps(extra(tmp_path / "store")))
    assert main(["doctor", "--sglang", f"@{written}"]) == 0
    assert "every key is known" in capfd.readouterr().out
    assert main(["doctor", "--sglang", json.dumps(extra(tmp_path) | {"sise": 1})]) == 1
    assert "`sise`" in capfd.readouterr().out
    assert main(["doctor", "--sglang", "{"]) == 2
    assert main(["doctor", "--sglang"]) == 2
    fits = ["doctor", "--sglang", f"@{written}", "--page-bytes"]
    assert main([*fits, "1MiB"]) == 0
    assert main([*fits, "1GiB"]) == 1
    assert main([*fits, "big"]) == 2


def test_the_doctor_names_a_file_without_its_sign_and_another_sglang(tmp_path, capfd, monkeypatch):
    from larder_kv import __main__ as command

    assert command.main(["doctor", "--sglang", "sglang.json"]) == 2
    assert "@sglang.json" in capfd.readouterr().err
    right = ["doctor", "--sglang", json.dumps(extra(tmp_path / "store"))]
    assert command.main(right) == 0
    assert "release tested" not in capfd.readouterr().out
    monkeypatch.setattr(command, "SGLANG_TESTED", "0.0.1")
    assert command.main(right) == 0
    assert "warn  SGLang" in capfd.readouterr().out
