"""The message that the parts of an answer add up to. Owns: ``message_of``, ``calls_of``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from jaxinfer.text.answers.call_parts import CallArguments, CallBegin, CallEnd
from jaxinfer.text.answers.parser import Content, Part, Reasoning
from kit.answer_texts import Message


class ReadCall(NamedTuple):
    """A call, with its arguments as they were sent."""

    name: str
    arguments: str
    is_whole: bool = True


def calls_of(parts: Iterable[Part]) -> list[ReadCall]:
    """The calls; checks that their parts are in order."""
    calls: list[ReadCall] = []
    is_open = False
    for part in parts:
        if isinstance(part, CallBegin):
            assert not is_open
            calls.append(ReadCall(part.name, ""))
            is_open = True
        elif isinstance(part, CallArguments):
            assert is_open and part.text
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part.text)
        elif isinstance(part, CallEnd):
            assert is_open
            calls[-1] = calls[-1]._replace(is_whole=part.is_whole)
            is_open = False
        else:
            assert not is_open
    assert not is_open
    return calls


def texts_of(parts: Iterable[Part]) -> tuple[str, str]:
    """The content and the thoughts."""
    listed = list(parts)
    return (
        "".join(part.text for part in listed if isinstance(part, Content)),
        "".join(part.text for part in listed if isinstance(part, Reasoning)),
    )


def message_of(parts: Iterable[Part]) -> Message:
    """The message; all calls must be whole."""
    listed = list(parts)
    calls = calls_of(listed)
    assert all(one.is_whole for one in calls), calls
    content, reasoning = texts_of(listed)
    return Message(
        content, tuple((one.name, json.loads(one.arguments)) for one in calls), reasoning
    )
