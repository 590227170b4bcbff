"""Damages files: bytes anywhere, and the structure of JSON and of GGUF headers."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

EXTREMES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 255, 2**16, 10**6, 10**9, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64),
    *(10**400, -(2**63), 0.5, 2.0, -0.0, 1e-300, 1e300, float("nan"), float("inf")),
    *(None, True, False, "", "x", "5", "../x", "\u0000", [], [1], ["a"], {}, {"a": 1}, [[]]),
)
_DEEP = "\u0001deep\u0001"  # stands for a value that is nested deep
_DEEP_TEXTS = ("[" * 50_000 + "]" * 50_000, '{"a":' * 3_000 + "1" + "}" * 3_000, "[" * 100_000)
_WORDS = (0, 1, 2, 3, 7, 31, 33, 64, 2**16, 2**24, 2**31, 2**32 - 1)
_LONG_WORDS = (*_WORDS, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)


def damaged_bytes(content: bytes, draw: random.Random, end: int | None = None) -> bytes:
    """The content with some bytes of its first ``end`` ones changed, cut out, or added."""
    made, end = bytearray(content), len(content) if end is None else end
    at = draw.randrange(end)
    left = end - at
    match draw.randrange(7):
        case 0:
            made[at] ^= 1 << draw.randrange(8)
        case 1:
            for _ in range(draw.randrange(2, 9)):
                made[draw.randrange(end)] ^= 1 << draw.randrange(8)
        case 2:
            del made[at:]
        case 3:
            del made[at : at + min(draw.randrange(1, 17), left)]
        case 4:
            made[at:at] = draw.randbytes(draw.randrange(1, 17))
        case 5:
            span = min(draw.randrange(1, 9), left)
            made[at : at + span] = draw.choice((b"\0", b"\xff", b"0", b"9", b"["))[:1] * span
        case _:
            other = draw.randrange(end)
            span = min(draw.randrange(1, 33), left, end - other)
            made[at : at + span], made[other : other + span] = (
                content[other : other + span],
                content[at : at + span],
            )
    return bytes(made)


def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON text with one value replaced, removed, doubled, renamed, exchanged or nested."""
    root = json.loads(content)
    places = [*_places(root)]
    holder, key = draw.choice(places)
    match draw.randrange(8):
        case 0:
            del holder[key]
        case 1:
            holder[key] = _DEEP
        case 2 if isinstance(holder, dict):
            return _doubled(root, holder, key, draw)
        case 3 if isinstance(holder, dict):
            name = draw.choice([*holder, key[:-1], key + "x", key.upper(), "weight_map", "vocab"])
            holder[name] = holder.pop(key)
        case 4:
            other, name = draw.choice(places)
            if _fits(other, name):
                holder[key], other[name] = other[name], holder[key]
        case 5 if isinstance(holder[key], int | float):
            holder[key] += draw.choice((-1, 1, 0.5, 4, 32, -4))
        case _:
            holder[key] = draw.choice(EXTREMES)
    try:
        text = json.dumps(root)
    except ValueError:  # an exchange that made a circle
        return content
    return text.replace(json.dumps(_DEEP), draw.choice(_DEEP_TEXTS)).encode()


def _fits(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key or an index of it; of long ones some."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys if len(keys) < 60 else (*keys[:20], *keys[-20:]):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _doubled(root: Any, holder: dict[str, Any], key: str, draw: random.Random) -> bytes:
    """The text with a key of an object twice; the second has the same value or another one."""
    again, mark = draw.choice((holder[key], *EXTREMES[:6])), "\u0001again\u0001"
    holder[mark] = again
    return json.dumps(root).replace(json.dumps(mark), json.dumps(key)).encode()


def damaged_gguf(content: bytes, draw: random.Random, end: int) -> bytes:
    """A GGUF file with a count, a length, a type or other bytes of its header changed.

    ``end``: where its tensors' data begin.
    """
    if draw.random() < 0.5:
        return damaged_bytes(content, draw, end)
    made = bytearray(content)
    if draw.random() < 0.1:
        at = draw.choice((4, 8, 16))
    else:  # a small number of 8 bytes: a length, a count or an offset
        small = [i for i in range(8, end - 8) if not any(content[i + 3 : i + 8]) and content[i]]
        at = draw.choice(small)
    if draw.random() < 0.5:
        (value,) = struct.unpack_from("<Q", made, at)
        made[at : at + 8] = struct.pack("<Q", (value + draw.choice((-1, 1, 4, 32, -32))) % 2**64)
    elif draw.random() < 0.5:
        made[at : at + 8] = struct.pack("<Q", draw.choice(_LONG_WORDS))
    else:
        made[at : at + 4] = struct.pack("<I", draw.choice(_WORDS))
    return bytes(made)
