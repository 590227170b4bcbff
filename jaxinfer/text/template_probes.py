"""Probes of a chat template: which forms of messages it accepts, found by rendering small chats.

Templates differ in how they handle a tool call's arguments, a content that is absent or null, and a
content in parts; a model's files do not say which form the template accepts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.messages import (
    Message,
    arguments_object,
    arguments_text,
    content_text,
    join_parts,
)

_FUNCTION, _KEY, _VALUE = "probe_function", "probe_key", "probe value"
_ARGUMENTS = {_KEY: _VALUE}
_CALL_ID = "probe0000"  # Mistral's templates accept only ids of nine characters
_WORDS = ("probe words", "further words")
_QUESTION: Message = {"role": "user", "content": "a question"}
_ANSWER: Message = {"role": "assistant", "content": "an answer"}
_RESULT: Message = {
    "role": "tool",
    "name": _FUNCTION,
    "tool_call_id": _CALL_ID,
    "content": _WORDS[0],
}
_PARAMETERS = {
    "type": "object",
    "properties": {_KEY: {"type": "string", "description": "a key"}},
    "required": [_KEY],
}
_TOOL = {
    "type": "function",
    "function": {"name": _FUNCTION, "description": "a probe", "parameters": _PARAMETERS},
}
_NONE: Mapping[str, Any] = MappingProxyType({})
_TOOLS: Mapping[str, Any] = MappingProxyType({"tools": [_TOOL]})
# the ways to have no content: without the key as in transformers, null, and empty text
_ABSENT: tuple[Message, ...] = ({}, {"content": None}, {"content": ""})


class Renders(NamedTuple):
    """The parts of a chat with tools that a template writes into the prompt."""

    tools: bool  # the functions that the model may call
    calls: bool  # of earlier answers, with their arguments
    results: bool  # messages of the role tool


class _CallForm(NamedTuple):
    """How a message with calls and without text is written."""

    absent: Message  # its content, as ``{}`` or ``{"content": ...}``
    as_text: bool  # the arguments are text, else an object


class TemplateProbes:
    """The forms that one template accepts. Each probe runs once, when a message first needs it."""

    def __init__(self, render: Callable[[Sequence[Message], Mapping[str, Any]], str]) -> None:
        """``render`` renders a chat with further variables by the template; it raises
        ``TokenizerError`` if that fails.
        """
        self._render = render

    @cached_property
    def renders(self) -> Renders:
        """Which parts of a chat with tools the prompt contains."""
        history = (_QUESTION, _call(*self._call_form), _RESULT, _ANSWER, _QUESTION)
        texts = [self._probe(*history, variables=variables) for variables in (_NONE, _TOOLS)]
        # a template that refuses calls may write results
        without_call = self._probe(_QUESTION, _ANSWER, _RESULT, _QUESTION)
        return Renders(
            tools=_FUNCTION in (self._probe(_QUESTION, variables=_TOOLS) or ""),
            calls=any(_shows(text, _VALUE) for text in texts),
            results=any(_shows(text, _WORDS[0]) for text in (*texts, without_call)),
        )

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """The result of ``check_messages`` in the form that the template accepts.

        Raises ``RequestError`` naming the message whose arguments are not a JSON object, if the
        template needs one.
        """
        return [
            self._adapted(f"messages[{index}]", message) for index, message in enumerate(messages)
        ]

    def with_system(self, messages: list[Message], given: Sequence[Message]) -> list[Message]:
        """The messages, whose first one may be a system message that the ``given`` ones have not:
        a template without one gets its text in the user's first message.
        """
        is_new = messages[0]["role"] == "system" != given[0]["role"]
        if not is_new or messages[1:2] == [] or self._takes_system:
            return messages
        system, first, *others = messages
        if first["role"] != "user":
            return [{**system, "role": "user"}, first, *others]
        text = f"{system['content']}\n\n{content_text(first)}"
        return [{**first, "content": text}, *others]

    def _adapted(self, where: str, message: Message) -> Message:
        message = dict(message)
        calls = message.get("tool_calls")
        if "content" not in message:
            message |= self._call_form.absent if calls else self._absent_content
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
        if self._call_form.as_text:
            return {**call, "arguments": arguments_text(arguments)}
        return {**call, "arguments": arguments_object(f"{where}.arguments", arguments)}

    # probes

    @cached_property
    def _call_form(self) -> _CallForm:
        """How a message with tool calls is written.

        Templates that concatenate the arguments need them as text, others iterate over them or
        write them by ``tojson``; one that accepts both gets the object, as in vLLM. Some templates
        test whether the content is null before they write the calls.
        """
        forms = [_CallForm(absent, as_text) for as_text in (False, True) for absent in _ABSENT]
        return self._best(forms, lambda form: _call(*form), shown=_VALUE)

    @cached_property
    def _takes_system(self) -> bool:
        """True if the template writes a system message."""
        system = {"role": "system", "content": _WORDS[0]}
        return _shows(self._probe(system, _QUESTION), _WORDS[0])

    @cached_property
    def _absent_content(self) -> Message:
        """The content of an assistant's message that has neither text nor tool calls."""
        return self._best(_ABSENT, lambda absent: {"role": "assistant", **absent})

    def _best[F](
        self, forms: Sequence[F], written: Callable[[F], Message], *, shown: str = ""
    ) -> F:
        """The first of the forms that is right in most chats: one that writes no null, and if
        possible ``shown``. The message is the last one, or others follow: QwQ's template reads
        other fields then.
        """

        def score(form: F) -> tuple[int, int]:
            message = written(form)
            as_usual = self._in_chats({**message, "content": _WORDS[0]})
            texts = zip(self._in_chats(message), as_usual, strict=True)
            clean = [text for text, usual in texts if text and _nulls(text) <= _nulls(usual)]
            return sum(_shows(text, shown) for text in clean), len(clean)

        return max(forms, key=score)

    def _in_chats(self, message: Message) -> list[str | None]:
        """The chats with an assistant's message, rendered."""
        answered = [_RESULT, _ANSWER] if "tool_calls" in message else []
        followed = (_QUESTION, message, *answered, _QUESTION)
        return [
            self._probe(_QUESTION, message),
            self._probe(*followed),
            self._probe(*followed, variables=_TOOLS),
        ]

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose content the template accepts as parts and writes in full."""
        before: dict[str, list[Message]] = {
            "system": [],
            "user": [],
            "assistant": [_QUESTION],
            "tool": [_QUESTION, _call(*self._call_form)],
        }
        after = {"system": [_QUESTION]}
        parts = [{"type": "text", "text": words} for words in _WORDS]
        roles = set[str]()
        for role, earlier in before.items():
            names = {"name": _FUNCTION, "tool_call_id": _CALL_ID} if role == "tool" else {}
            message = {"role": role, "content": parts, **names}
            text = self._probe(*earlier, message, *after.get(role, [])) or ""
            # a list that was printed by its repr shows its keys
            shows_keys = f"'text': '{_WORDS[0]}'" in text or f'"text": "{_WORDS[0]}"' in text
            if all(words in text for words in _WORDS) and not shows_keys:
                roles.add(role)
        return frozenset(roles)

    def _probe(self, *messages: Message, variables: Mapping[str, Any] = _NONE) -> str | None:
        """The chat rendered by the template; None if it refuses or fails."""
        try:
            return self._render(messages, variables)
        except TokenizerError:
            return None


def _call(absent: Message, as_text: bool) -> Message:
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    function = {"name": _FUNCTION, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", **absent, "tool_calls": [call]}


def _nulls(text: str | None) -> int:
    """How many nulls the text contains, in Python's or JSON's spelling."""
    return 0 if text is None else text.count("None") + text.count("null")


def _shows(text: str | None, words: str) -> bool:
    """True if the text has the words, and no object in Python's form or as text within text."""
    return (
        text is not None and words in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text
    )
