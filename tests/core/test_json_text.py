"""JSON of a model's files: damage and attacks are a ``ValueError`` that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxinfer.core.json_text import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_JSON_BYTES,
    parse_json,
    read_json,
    read_text,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "it is not UTF-8 at byte 0"),
        (b'{"a": "\xc3"}', "it is not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        (b'[{"x": {"b": 1, "b": 2}}]', "the key 'b' is there twice"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 levels deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64 levels deep"),
        (b'{"\\ud800": 1}', "half of a surrogate pair"),
        (b'["\\uDC00"]', "half of a surrogate pair"),
        (b"1" * 5000, "Exceeds the limit"),
    ],
)
def test_what_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"b": [1, 2.5, null, true, "x"]}, "b": {}}',
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        '["\\ud83d\\ude00", "é"]',
        '{"a": NaN, "b": 1e30}',
        "3",
    ],
)
def test_what_is_read(text: str) -> None:
    assert repr(parse_json(text.encode())) == repr(json.loads(text))


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1} and read_text(path) == '{"a": 1}'
    for read, most in ((read_json, MAX_JSON_BYTES), (read_text, MAX_BYTES)):
        with path.open("r+b") as file:
            file.truncate(most + 1)  # a hole, which takes no place
        with pytest.raises(ValueError, match=f"it has {most + 1} bytes, and at most {most} are"):
            read(path)


def test_lines_end_with_a_line_feed(tmp_path: Path) -> None:
    """As Python reads a text, and so transformers a chat template."""
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_text(path) == path.read_text("utf-8") == "a\nb\nc\n"
