"""Makes tests/data/profile/h200_8_rows.xplane.pb.gz from a trace of JAX's profiler on a GPU.

``python tests/golden/make_gpu_trace.py TRACE.xplane.pb OUT.gz``: the trace, taken with Python's
tracer around ``LLM.generate``, is cut to the first steps. Kernels and their launches on the host
stay as they are, with the stats that the parser reads. Each call of ``Executor.launch`` becomes a
mark as ``engine.loop.profiler`` writes it, since the trace is older than that. The messages are
those of XLA's xplane.proto, read and written here by field number.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.engine.loop.profiler import MARK

STEPS = 3  # a prompt step and two decode steps
KEPT = (b"correlation_id", b"hlo_op", b"hlo_module", b"name", b"cuda_graph_id")
STEP_NUM = b"step_num"
GPU, HOST = b"/device:GPU:0", b"/host:CPU"

type Value = Any  # an int, or bytes
type Fields = list[tuple[int, Value]]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message; of 8 bytes as bytes with the number negated."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
        elif kind == 1:
            yield -number, data[at : at + 8]
            at += 8
        else:
            size, at = varint(data, at)
            yield number, data[at : at + size]
            at += size


def number_bytes(value: int) -> bytes:
    """A number as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def message(parts: Fields) -> bytes:
    """The inverse of ``fields``."""
    out = bytearray()
    for number, value in parts:
        if number < 0:
            out += number_bytes(-number << 3 | 1) + value
        elif isinstance(value, int):
            out += number_bytes(number << 3) + number_bytes(value)
        else:
            out += number_bytes(number << 3 | 2) + number_bytes(len(value)) + value
    return bytes(out)


def of(data: bytes, number: int) -> list[Value]:
    """All values of a field."""
    return [value for found, value in fields(data) if found == number]


def one(data: bytes, number: int) -> Value:
    """The value of a field, 0 if it is absent."""
    return (of(data, number) or [0])[0]


def names(plane: bytes, number: int) -> dict[int, bytes]:
    """The names of events (4) or stats (5) by their ids."""
    entries = [of(entry, 2)[0] for entry in of(plane, number)]
    return {one(entry, 1): one(entry, 2) for entry in entries}


def cut_plane(plane: bytes, last: set[int], end_ps: int = 1 << 62) -> tuple[bytes, list[int]]:
    """A plane's events until ``end_ps``, and the begins of its launches; the host's get marks.

    Of a GPU the events are those with a correlation id that the host's events added to ``last``.
    """
    events, stats = names(plane, 4), names(plane, 5)
    on_host = one(plane, 2) == HOST
    mark, step_num = max(events) + 1, max(stats) + 1
    used_events, used_stats, launches = {mark}, {step_num}, list[int]()
    lines: Fields = []
    for line in of(plane, 3):
        begin = 1000 * one(line, 3)
        kept: Fields = [(n, v) for n, v in fields(line) if n in (1, 2, 3)]
        for event in sorted(of(line, 4), key=lambda e: one(e, 2)):
            start, name = begin + one(event, 2), events[one(event, 1)]
            if start >= end_ps:
                continue
            if on_host and name.startswith(b"$executor.py") and name.endswith(b" launch"):
                number = message([(1, step_num), (4, len(launches))])
                launches.append(start)
                own = [(n, v) for n, v in fields(event) if n in (2, 3)]
                kept.append((4, message([(1, mark), *own, (4, number)])))
                continue
            own = [s for s in of(event, 4) if stats[one(s, 1)] in KEPT]
            values = {stats[one(s, 1)]: one(s, 3) or one(s, 4) for s in own}
            if (key := values.get(b"correlation_id")) is None or not (on_host or key in last):
                continue
            last.add(key)
            used_events.add(one(event, 1))
            for stat in own:
                used_stats |= {one(stat, 1), one(stat, 7)}
            rest = [(n, v) for n, v in fields(event) if n in (1, 2, 3)]
            kept.append((4, message([*rest, *((4, s) for s in own)])))
        lines.append((3, message(kept)))
    events[mark], stats[step_num] = MARK.encode(), STEP_NUM
    tables: Fields = []
    for number, known, used in ((4, events, used_events), (5, stats, used_stats)):
        for key in sorted(used & known.keys()):
            entry = message([(1, key), (2, known[key])])
            tables.append((number, message([(1, key), (2, entry)])))
    return message([(1, one(plane, 1)), (2, one(plane, 2)), *lines, *tables]), launches


def main(source: str, target: str) -> None:
    """Cut until the launch after the last step."""
    planes = {one(plane, 2): plane for plane in of(Path(source).read_bytes(), 1)}
    _, launches = cut_plane(planes[HOST], set())
    keys = set[int]()
    host, _ = cut_plane(planes[HOST], keys, launches[STEPS])
    device, _ = cut_plane(planes[GPU], keys)
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write(message([(1, device), (1, host)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
