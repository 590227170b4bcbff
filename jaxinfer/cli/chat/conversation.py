"""The messages of a conversation, in OpenAI's form, and their file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.cli.chat.events import CallPart, Event, Said, Thought
from jaxinfer.core.errors import RequestError
from jaxinfer.core.json_text import read_json

type Message = dict[str, Any]

CUT = "cut"  # marks an answer that was ended before its end
THOUGHTS = "reasoning_content"
UNSENT = (CUT, THOUGHTS)  # fields of the file that templates and other servers need not know
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class Answer:
    """An answer as far as it has arrived."""

    content: str = ""
    thoughts: str = ""
    calls: dict[int, CallPart] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add an event's text."""
        match event:
            case Thought(text):
                self.thoughts += text
            case Said(text):
                self.content += text
            case CallPart(number, name_id, name, arguments):
                before = self.calls.get(number, CallPart(number, "", "", ""))
                self.calls[number] = CallPart(
                    number,
                    before.id or name_id,
                    before.name or name,
                    before.arguments + arguments,
                )
            case _:
                pass

    def message(self, *, is_cut: bool) -> Message | None:
        """The assistant's message; None if there is none. A call that was cut off is left out."""
        calls = [_call(part) for part in self.calls.values() if _is_whole(part)]
        if not (self.content or calls):
            return None
        message: Message = {"role": "assistant", "content": self.content or None}
        if self.thoughts:
            message[THOUGHTS] = self.thoughts
        if calls:
            message["tool_calls"] = calls
        return {**message, CUT: True} if is_cut else message


class Conversation:
    """A system message and the messages after it."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []

    def to_send(self, asked: Message) -> list[Message]:
        """The messages of a request that answers ``asked``."""
        return [
            {name: value for name, value in message.items() if name not in UNSENT}
            for message in (*self._all(), asked)
        ]

    def next_message(self, text: str) -> Message:
        """A message of the user; the result of the first call that has none, if there is one."""
        call = self.open_call
        if call is None:
            return {"role": "user", "content": text}
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    @property
    def open_call(self) -> Message | None:
        """The first call without a result."""
        calls: list[Message] = []
        for message in self.messages:
            if message["role"] == "tool":
                calls = [one for one in calls if one["id"] != message.get("tool_call_id")]
            else:
                calls = message.get("tool_calls") or []
        return calls[0] if calls else None

    def take_last_turn(self) -> Message | None:
        """Remove the last answer and the message that it answers, which is returned."""
        count = len(self.messages)
        while count and self.messages[count - 1]["role"] == "assistant":
            count -= 1
        if not count or self.messages[count - 1]["role"] not in ("user", "tool"):
            return None
        asked = self.messages[count - 1]
        del self.messages[count - 1 :]
        return asked

    def save(self, path: Path) -> None:
        """Write the messages as JSON; raises ``RequestError``."""
        try:
            text = json.dumps(self._all(), ensure_ascii=False, indent=1)
            path.write_bytes(f"{text}\n".encode())
        except (OSError, ValueError) as error:  # of the disk, or of the path or the text
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"{path} cannot be written ({reason}); give another file") from None

    def load(self, path: Path) -> None:
        """Replace the messages by those of a file; raises ``RequestError`` and keeps them."""
        messages = read_json_list(path, "messages")
        for number, message in enumerate(messages):
            if message.get("role") not in ROLES:
                roles = ", ".join(ROLES)
                raise RequestError(f"{path}: messages[{number}].role must be one of {roles}")
            calls = message.get("tool_calls") or []
            if not isinstance(calls, list) or not all(map(_has_id_and_name, calls)):
                raise RequestError(
                    f"{path}: messages[{number}].tool_calls must have id and function.name"
                )
        first = messages[0] if messages else {}
        has_system = first.get("role") == "system" and isinstance(first.get("content"), str)
        self.system = first["content"] if has_system else None
        self.messages = messages[1:] if has_system else messages

    def _all(self) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.messages


def read_json_list(path: Path, what: str) -> list[Message]:
    """The list of objects in a JSON file; raises ``RequestError``."""
    try:
        found = read_json(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give another file") from None
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); give a file of {what}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RequestError(f"{path} must have a list of {what}, each of them an object")
    return found


def _call(part: CallPart) -> Message:
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def _is_whole(part: CallPart) -> bool:
    try:
        return isinstance(json.loads(part.arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _has_id_and_name(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return named and isinstance(call.get("id"), str)
