"""What a chat template expects of messages, found out by rendering small chats with it.

Templates differ in what they do with a call's arguments, with a content that is absent or null, and
with a content in parts; nothing in a model's files says which.

Owns: the trials, and bringing messages into the form that the template takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.messages import (
    Message,
    arguments_object,
    arguments_text,
    called_function,
    joined,
)

_QUESTION = MappingProxyType({"role": "user", "content": "a question"})
_FUNCTION = "probe_function"
_WORDS = ("probe words", "further words")
_ARGUMENTS_TEXT = '{"probe_key": "probe value"}'


class Expectations:
    """What one template expects. Each trial runs once, when the first message needs to know it."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        """``render`` writes a chat by the template, and raises ``TokenizerError`` if that fails."""
        self._render = render

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """What ``check_messages`` gives, as the template takes it.

        Raises ``RequestError`` naming the message whose arguments are no JSON object, if the
        template needs one.
        """
        return [
            self._adapted(f"messages[{index}]", message) for index, message in enumerate(messages)
        ]

    def _adapted(self, where: str, message: Message) -> Message:
        message = dict(message)
        calls = message.get("tool_calls")
        if "content" not in message:
            message |= self._without_content_beside_calls if calls else self._without_content
        elif isinstance(message["content"], list) and message["role"] not in self._roles_in_parts:
            message["content"] = joined(message["content"])
        if calls:
            message["tool_calls"] = [
                self._adapted_call(f"{where}.tool_calls[{index}]", call)
                for index, call in enumerate(calls)
            ]
        return message

    def _adapted_call(self, where: str, call: Mapping[str, Any]) -> dict[str, Any]:
        function = called_function(call)
        if "arguments" not in function:
            return dict(call)
        if function is not call:
            where += ".function"
        arguments = function["arguments"]
        if self._joins_arguments:
            arguments = arguments_text(arguments)
        else:
            arguments = arguments_object(f"{where}.arguments", arguments)
        changed = {**function, "arguments": arguments}
        return changed if function is call else {**call, "function": changed}

    # the trials

    @cached_property
    def _joins_arguments(self) -> bool:
        """Whether the template joins a call's arguments to its text, and so needs them as text.

        Others walk through them or write them by ``tojson``; those that take both get the object,
        as in vLLM.
        """
        lack = self._without_content_beside_calls
        as_object = self._trial(_QUESTION, _call(lack, _arguments_object())) or ""
        as_text = self._trial(_QUESTION, _call(lack, _ARGUMENTS_TEXT)) or ""
        takes_object = "probe_key" in as_object and "'probe_key'" not in as_object  # Python's repr
        return "probe_key" in as_text and not takes_object

    @cached_property
    def _without_content_beside_calls(self) -> Message:
        """The content of a message with tool calls and no text, as ``{}`` or ``{"content": ...}``.

        Some templates test whether it is null before they write the calls.
        """
        usual = _nulls(self._call_trial({"content": _WORDS[0]}))
        trials = [(lack, self._call_trial(lack)) for lack in _lacks()]
        clean = [(lack, text) for lack, text in trials if text and _nulls(text) <= usual]
        showing = [lack for lack, text in clean if _FUNCTION in text]
        return [*showing, *(lack for lack, _ in clean), {"content": ""}][0]

    def _call_trial(self, lack: Message) -> str | None:
        return self._trial(_QUESTION, _call(lack, _arguments_object())) or self._trial(
            _QUESTION, _call(lack, _ARGUMENTS_TEXT)
        )

    @cached_property
    def _without_content(self) -> Message:
        """The same for an answer that has neither text nor tool calls."""
        answer = {"role": "assistant"}
        usual = _nulls(self._trial(_QUESTION, {**answer, "content": _WORDS[0]}))
        for lack in _lacks():
            text = self._trial(_QUESTION, {**answer, **lack})
            if text and _nulls(text) <= usual:
                return lack
        return {"content": ""}

    @cached_property
    def _roles_in_parts(self) -> frozenset[str]:
        """The roles whose content the template writes part by part, all of its text."""
        arguments = _ARGUMENTS_TEXT if self._joins_arguments else _arguments_object()
        call = _call(self._without_content_beside_calls, arguments)
        before: dict[str, list[Message]] = {
            "system": [],
            "user": [],
            "assistant": [dict(_QUESTION)],
            "tool": [dict(_QUESTION), call],
        }
        after = {"system": [dict(_QUESTION)]}
        parts = [{"type": "text", "text": words} for words in _WORDS]
        roles = set[str]()
        for role, earlier in before.items():
            message = {"role": role, "content": parts, **_tool_names(role)}
            text = self._trial(*earlier, message, *after.get(role, [])) or ""
            # a list that was printed as it is shows its keys
            shows_keys = f"'text': '{_WORDS[0]}'" in text or f'"text": "{_WORDS[0]}"' in text
            if all(words in text for words in _WORDS) and not shows_keys:
                roles.add(role)
        return frozenset(roles)

    def _trial(self, *messages: Mapping[str, Any]) -> str | None:
        """What the template makes of a chat, None if it refuses or fails."""
        try:
            return self._render([dict(message) for message in messages])
        except TokenizerError:
            return None


def _arguments_object() -> dict[str, str]:
    return {"probe_key": "probe value"}


def _lacks() -> tuple[Message, ...]:
    """The ways to have no content: without the key as in transformers, null, and no text."""
    return {}, {"content": None}, {"content": ""}


def _call(lack: Message, arguments: str | Mapping[str, str]) -> Message:
    function = {"name": _FUNCTION, "arguments": arguments}
    # Mistral's templates take ids of nine characters only
    call = {"id": "probe0000", "type": "function", "function": function}
    return {"role": "assistant", **lack, "tool_calls": [call]}


def _tool_names(role: str) -> Message:
    return {"name": _FUNCTION, "tool_call_id": "probe0000"} if role == "tool" else {}


def _nulls(text: str | None) -> int:
    """How often a null was written: as Python spells it, or as JSON does."""
    return 0 if text is None else text.count("None") + text.count("null")
