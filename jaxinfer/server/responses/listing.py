"""The items that a response answers, as ``GET /v1/responses/{id}/input_items`` lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxinfer.server.api.fields import field_error
from jaxinfer.server.responses.items import Item
from jaxinfer.server.responses.objects import InputItemList, Status

MAX_LISTED = 100  # items of a page
DEFAULT_LISTED = 20
_PREFIXES: Mapping[str, str] = MappingProxyType(  # of ids, as OpenAI's
    {
        "message": "msg",
        "reasoning": "rs",
        "function_call": "fc",
        "function_call_output": "fco",
        "custom_tool_call": "ctc",
        "custom_tool_call_output": "ctco",
    }
)


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """The items of a request in the form of a list: with id, type and status, and text as a part.

    ``name``: that of the response, which new ids contain.
    """
    listed: list[Item] = []
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        own: dict[str, Any] = {"type": kind, "status": Status.COMPLETED, **item}
        if not own.get("id"):
            own["id"] = f"{_PREFIXES.get(kind, 'item')}_{name}_in{number}"
        if kind == "message" and isinstance(text := own["content"], str):
            part = "output_text" if own["role"] == "assistant" else "input_text"
            notes = {"annotations": []} if part == "output_text" else {}
            own["content"] = [{"type": part, "text": text, **notes}]
        listed.append({**own, "type": kind})
    return listed


def page(items: Sequence[Item], query: Mapping[str, str]) -> InputItemList:
    """The page of the items that the query's ``limit``, ``order`` and ``after`` describe; raises
    ``ApiError``.
    """
    limit, order = query.get("limit", str(DEFAULT_LISTED)), query.get("order", "desc")
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 3
    if not is_number or not 1 <= int(limit) <= MAX_LISTED:
        raise field_error("limit", f"limit must be an integer from 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise field_error("order", "order must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after"):
        places = [number for number, item in enumerate(ordered) if item.get("id") == after]
        if not places:
            raise field_error("after", f"after {after[:100]!r} is the id of none of the items")
        ordered = ordered[places[0] + 1 :]
    data = [dict(item) for item in ordered[: int(limit)]]
    return InputItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=len(ordered) > len(data),
    )
