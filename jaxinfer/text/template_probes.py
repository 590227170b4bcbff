"""Probes of a chat template: which forms of messages it accepts, found by rendering small chats.

Templates differ in how they handle a tool call's arguments, a content that is absent or null, and a
content in parts; a model's files do not say which form the template accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.messages import Message, arguments_object, arguments_text, join_parts

_QUESTION = MappingProxyType({"role": "user", "content": "a question"})
_FUNCTION = "probe_function"
_WORDS = ("probe words", "further words")
_ARGUMENTS_TEXT = '{"probe_key": "probe value"}'


class TemplateProbes:
    """The forms that one template accepts. Each probe runs once, when a message first needs it."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        """``render`` renders a chat by the template; it raises ``TokenizerError`` if that fails."""
        self._render = render

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """The result of ``check_messages`` in the form that the template accepts.

        Raises ``RequestError`` naming the message whose arguments are not a JSON object, if the
        template needs one.
        """
        return [
            self._adapted(f"messages[{index}]", message) for index, message in enumerate(messages)
        ]

    def _adapted(self, where: str, message: Message) -> Message:
        message = dict(message)
        calls = message.get("tool_calls")
        if "content" not in message:
            message |= self._absent_content_with_calls if calls else self._absent_content
        elif isinstance(message["content"], list) and message["role"] not in self._roles_with_parts:
            message["content"] = join_parts(message["content"])
        if calls:
            message["tool_calls"] = [
                self._adapted_call(f"{where}.tool_calls[{index}]", call)
                for index, call in enumerate(calls)
            ]
        return message

    def _adapted_call(self, where: str, call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": self._adapted_call(f"{where}.function", call["function"])}
        arguments = call.get("arguments")
        if arguments is None:
            return dict(call)
        if self._needs_arguments_as_text:
            return {**call, "arguments": arguments_text(arguments)}
        return {**call, "arguments": arguments_object(f"{where}.arguments", arguments)}

    # probes

    @cached_property
    def _needs_arguments_as_text(self) -> bool:
        """True if the template needs a call's arguments as text, since it concatenates them.

        Other templates iterate over them or write them by ``tojson``. A template that accepts both
        gets the object, as in vLLM.
        """
        absent = self._absent_content_with_calls
        as_object = self._probe(_QUESTION, _call(absent, _arguments_object())) or ""
        as_text = self._probe(_QUESTION, _call(absent, _ARGUMENTS_TEXT)) or ""
        takes_object = "probe_key" in as_object and "'probe_key'" not in as_object  # Python's repr
        return "probe_key" in as_text and not takes_object

    @cached_property
    def _absent_content_with_calls(self) -> Message:
        """The content of a message with tool calls and no text, as ``{}`` or ``{"content": ...}``.

        Some templates test whether it is null before they write the calls.
        """
        return self._best_absent_content(
            lambda content: (
                self._probe(_QUESTION, _call(content, _arguments_object()))
                or self._probe(_QUESTION, _call(content, _ARGUMENTS_TEXT))
            )
        )

    @cached_property
    def _absent_content(self) -> Message:
        """The same for an assistant's message that has neither text nor tool calls."""
        return self._best_absent_content(
            lambda content: self._probe(_QUESTION, {"role": "assistant", **content})
        )

    def _best_absent_content(self, probe: Callable[[Message], str | None]) -> Message:
        """The first way to have no content that writes no null, if possible one with the call."""
        usual = _nulls(probe({"content": _WORDS[0]}))
        # without the key as in transformers, null, and empty text
        probes = [(absent, probe(absent)) for absent in ({}, {"content": None}, {"content": ""})]
        clean = [(absent, text) for absent, text in probes if text and _nulls(text) <= usual]
        showing = [absent for absent, text in clean if _FUNCTION in text]
        return [*showing, *(absent for absent, _ in clean), {"content": ""}][0]

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose content the template accepts as parts and writes in full."""
        arguments = _ARGUMENTS_TEXT if self._needs_arguments_as_text else _arguments_object()
        call = _call(self._absent_content_with_calls, arguments)
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
            names = {"name": _FUNCTION, "tool_call_id": "probe0000"} if role == "tool" else {}
            message = {"role": role, "content": parts, **names}
            text = self._probe(*earlier, message, *after.get(role, [])) or ""
            # a list that was printed by its repr shows its keys
            shows_keys = f"'text': '{_WORDS[0]}'" in text or f'"text": "{_WORDS[0]}"' in text
            if all(words in text for words in _WORDS) and not shows_keys:
                roles.add(role)
        return frozenset(roles)

    def _probe(self, *messages: Mapping[str, Any]) -> str | None:
        """The chat rendered by the template; None if it refuses or fails."""
        try:
            return self._render([dict(message) for message in messages])
        except TokenizerError:
            return None


def _arguments_object() -> dict[str, str]:
    return {"probe_key": "probe value"}


def _call(absent: Message, arguments: str | Mapping[str, str]) -> Message:
    function = {"name": _FUNCTION, "arguments": arguments}
    # Mistral's templates accept only ids of nine characters
    call = {"id": "probe0000", "type": "function", "function": function}
    return {"role": "assistant", **absent, "tool_calls": [call]}


def _nulls(text: str | None) -> int:
    """How many nulls the text contains, in Python's or JSON's spelling."""
    return 0 if text is None else text.count("None") + text.count("null")
