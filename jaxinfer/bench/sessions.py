"""Sessions: requests of which each is sent after the answer before it and a pause.

Agents and chats are such: a turn repeats what was before it, which a prefix cache finds. A file has
a JSON object a line, in one of AIPerf's forms:

- ``{"session_id": s, "turns": [{"text": t, "delay": ms}, ...]}``: texts of a user; the server's own
  answers stand between them.
- ``{"text": t, "output_length": n}``: a session of one turn; Mooncake's key is ``text_input``.
- ``{"session_id": s, "messages": [...], "output_length": n, "delay": ms}``: a turn a line, with all
  messages before it, so that every engine gets the same ones; ``tools`` are sent too.
- ``{"session_id": s, "input_length": n, "output_length": n, "hash_ids": [...], "delay": ms}``:
  Mooncake's trace; equal ids are equal tokens.

The first turn may have a ``timestamp`` in ms, at which its session begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.traces import Arrival, queries_of
from jaxinfer.bench.workload import DEFAULT_OUTPUT, Query, file_text
from jaxinfer.core.errors import BenchError

KEYS = ("session_id", "turns", "messages", "text", "text_input")  # of which a session has one

type Rows = list[Mapping[str, Any]]


def read_sessions(path: Path, count: int) -> list[Rows]:
    """The turns of the first ``count`` sessions, in the order in which they begin.

    Raises ``BenchError`` if the file has none, or a row of another form.
    """
    found: dict[str, Rows] = {}
    for number, line in enumerate(file_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "text_input" in row:
                row["text"] = row["text_input"]
            turns = row.get("turns", [row])
            checked = [_checked(turn) for turn in turns]
            if not checked:
                raise ValueError("it has no turns")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise BenchError(
                f"{path} has no turn of a session in line {number} ({error}); a turn has text, "
                "messages, or input_length"
            ) from error
        found.setdefault(str(row.get("session_id", f"line {number}")), []).extend(checked)
    sessions = sorted(found.values(), key=lambda rows: rows[0].get("timestamp", 0))[:count]
    if not sessions:
        raise BenchError(f"{path} has no sessions; name another --dataset-path")
    return sessions


def has_sessions(path: Path) -> bool:
    """True if the first row of a file is a turn, or the turns, of a session, or has a text."""
    first = next((line for line in file_text(path).splitlines() if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError:
        return False  # Azure's form
    return isinstance(row, dict) and not row.keys().isdisjoint(KEYS)


def _checked(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """``turn`` if it has one of the forms; raises ``ValueError`` or ``KeyError`` if not."""
    if turn.get("messages"):
        if not all(isinstance(one, dict) and "role" in one for one in turn["messages"]):
            raise ValueError("a message has no role")
    elif "text" in turn:
        if not isinstance(turn["text"], str):
            raise ValueError("text is no string")
    elif int(turn["input_length"]) < 1:
        raise ValueError("input_length is not above 0")
    if float(turn.get("delay") or 0) < 0:
        raise ValueError("delay is below 0")
    if "output_length" in turn and int(turn["output_length"] or 0) < 0:
        raise ValueError("output_length is below 0")
    if not math.isfinite(turn.get("timestamp", 0)):
        raise ValueError("timestamp is no time")
    return turn


def session_times(sessions: Sequence[Rows], scale: float) -> list[float] | None:
    """Seconds from the start at which each session begins; None if the file does not say."""
    if not all("timestamp" in rows[0] for rows in sessions):
        return None
    first = sessions[0][0]["timestamp"]
    return [(rows[0]["timestamp"] - first) / 1e3 * scale for rows in sessions]


def session_queries(
    sessions: Sequence[Rows],
    vocab: Sequence[int],
    seed: int,
    *,
    scale: float = 1.0,
    max_input_len: int | None = None,
    output_len: int | None = None,
) -> list[Query]:
    """The requests of all sessions, one session after the other.

    ``scale`` is that of the pauses. ``vocab`` is read only for turns that have lengths alone.
    """
    queries: list[Query] = []
    for number, rows in enumerate(sessions):
        for turn, row in enumerate(rows):
            length = output_len or int(row.get("output_length") or DEFAULT_OUTPUT)
            think = float(row.get("delay") or 0) / 1e3 * scale if turn else 0.0
            place = {"session": number + 1, "think": think}
            if row.get("messages"):
                tools = {"tools": row["tools"]} if row.get("tools") else {}
                queries.append(Query(row["messages"], length, fields=tools, **place))
            elif "text" in row:
                said = [{"role": "user", "content": row["text"]}]
                queries.append(Query(said, length, continues=turn > 0, **place))
            else:
                blocks = tuple(row.get("hash_ids", ()))
                arrival = Arrival(0.0, int(row["input_length"]), length, blocks)
                own = seed if blocks else seed + 7919 * (len(queries) + 1)
                (made,) = queries_of([arrival], vocab, own, max_input_len=max_input_len)
                queries.append(Query(made.prompt, made.max_tokens, **place))
    return queries
