"""Descriptions of configurations, and the log's line about a changed one."""

from __future__ import annotations

import dataclasses
import enum
import json
import stat
from pathlib import Path

import pytest
from larder_kv import described, weights


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Inner:
    size: int = 1
    port: int = 2


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    kind: Kind = Kind.ONE
    names: set = dataclasses.field(default_factory=lambda: {"b", "a", "c"})
    path: Path = Path("/x")
    call: object = json.dumps
    more: dict = dataclasses.field(default_factory=lambda: {"b": [1, 2.5], "a": None})


def fields(value, **left_out):
    out = {kind: frozenset(names) for kind, names in left_out.items()}
    return described.fields("it", value, out)


def test_each_field_has_a_text_of_its_own():
    found = fields(Outer(), Inner=["port"])
    assert found == {
        "it": '"Outer"',
        "it.inner": '"Inner"',
        "it.inner.size": "1",
        "it.kind": '"Kind.ONE"',
        "it.names": json.dumps(['"a"', '"b"', '"c"']),
        "it.path": '"/x"',
        "it.call": '"json.dumps"',
        "it.more": '{"a": null, "b": [1, 2.5]}',
    }


def test_a_value_that_only_its_address_tells_has_another_text_at_each_start(caplog):
    for value in (lambda: 1, object(), [object()], {"a": {"b": object()}}):
        first, second = fields(value), fields(value)
        assert first != second and described.is_untold(first["it"])
        caplog.clear()
        weights.warn_of_untold(first)
        assert "the value of it cannot be distinguished" in caplog.text
    caplog.clear()
    weights.warn_of_untold(fields(Outer()))
    assert caplog.text == ""


def test_a_value_that_raises_is_another_one_at_each_start():
    class Broken:
        def to_dict(self):
            raise RuntimeError("not now")

    first = fields({"a": Broken()})
    assert described.is_untold(first["it"]) and first != fields({"a": Broken()})
    assert described.is_untold(fields(Broken())["it"])


def test_an_object_that_has_itself_is_described_to_its_end():
    inner = Inner()
    inner.size = inner
    ring = [1]
    ring.append(ring)
    for value in (inner, ring):
        assert fields(value) == fields(value)


def test_a_tensor_is_told_by_its_content():
    import torch

    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    assert fields(one) == fields(one.clone()) != fields(other)


def compared(volume, caplog, server="engine", is_encrypted=False, **values):
    """The log's lines of a start with these values."""
    caplog.clear()
    told = {name: json.dumps(value) for name, value in values.items()}
    tag = weights.Description(None, told).tag
    weights.compare(str(volume), server, tag, told, is_encrypted)
    return [line.message for line in caplog.records]


@pytest.fixture
def volume(tmp_path):
    file = tmp_path / "larder.store"
    file.write_bytes(b"")
    return file


def test_the_line_names_what_changed_and_shows_no_secret(volume, caplog):
    caplog.set_level("INFO", "larder_kv")
    assert compared(volume, caplog, size=1, key={"token": "secret"}) == []
    assert compared(volume, caplog, size=1, key={"token": "secret"}) == []
    secrets = {"url": "https://me:secret@host", "more": '{"a": "secret"}'}
    assert compared(volume, caplog, "third", **secrets) == []
    (line,) = compared(volume, caplog, size=2, key={"token": "other"}, new=True)
    assert "size: 1 -> 2" in line and "new: none -> true" in line
    assert "key: digest" in line and "secret" not in line and "other" not in line
    assert compared(volume, caplog, "another", size=3) == []
    assert compared(volume, caplog, size=2, key={"token": "other"}, new=True) == []
    notes = volume.parent / weights.NOTES
    assert "secret" not in notes.read_text() and stat.S_IMODE(notes.stat().st_mode) == 0o600


def test_nothing_is_noted_beside_an_encrypted_store(volume, caplog):
    assert compared(volume, caplog, is_encrypted=True, size=1) == []
    assert compared(volume, caplog, is_encrypted=True, size=2) == []
    assert not (volume.parent / weights.NOTES).exists()


def test_a_failed_comparison_costs_the_line_alone(volume, tmp_path, caplog):
    caplog.set_level("INFO", "larder_kv")
    notes = volume.parent / weights.NOTES
    notes.write_text("no JSON")
    assert compared(volume, caplog, size=1) == []
    notes.unlink()
    notes.mkdir()
    (line,) = compared(volume, caplog, size=2)
    assert "is not compared" in line
    assert compared("/dev/null", caplog, size=1) == [], "there is no place beside a device"
