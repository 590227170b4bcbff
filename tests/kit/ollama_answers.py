"""The cases of ``kit.answer_matrix`` in ollama's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

THINK: Mapping[str, Any] = {"absent": {}, "on": {"think": True}} | dict.fromkeys(
    ("off", "none"), {"think": False}
)


def body(
    messages: Sequence[Any],
    thinking: str,
    schema: Mapping[str, Any] | None,
    function: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The request; ``thinking`` as in the matrix."""
    tools = [] if function is None else [{"type": "function", "function": function}]
    form = {} if schema is None else {"format": schema}
    fields = {"model": "scripted", "messages": messages, "options": {"num_predict": 400}}
    return {**fields, **THINK[thinking], **form, "tools": tools}


def said(parts: Sequence[Any]) -> tuple[str, str, tuple[tuple[str, str], ...], str]:
    """Thoughts, text, calls and the end, as chats call it, of a whole answer or of its lines."""
    assert all("message" in part for part in parts), parts
    messages = [part["message"] for part in parts]
    calls = [one["function"] for message in messages for one in message.get("tool_calls", ())]
    return (
        "".join(message.get("thinking", "") for message in messages).strip(),
        "".join(message["content"] for message in messages),
        tuple((one["name"], json.dumps(one["arguments"], separators=(",", ":"))) for one in calls),
        "tool_calls" if calls else parts[-1]["done_reason"],
    )
