"""Probes of a chat template: which forms of messages and tools it accepts, found by rendering small
chats.

Templates differ in how they handle a tool call's arguments, a content that is absent or null, a
content in parts, and more; a model's files do not say which form the template accepts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.messages import Message

PROBE_FUNCTION, PROBE_KEY = "probe_function", "probe_key"
_VALUE = "probe value"
_IDS = ("probe0000", "probe0001")  # of calls: nine characters, as Mistral's templates demand
_WORDS = ("probe words", "further words", "last words")
_NAME, _NO_NAMES = "probe_name", ("", "None", "unknown")
_QUESTION: Mapping[str, Any] = MappingProxyType({"role": "user", "content": "a question"})
_ANSWER: Mapping[str, Any] = MappingProxyType({"role": "assistant", "content": "an answer"})
# the ways to have no content: without the key as in transformers, null, and empty text
_ABSENT: tuple[Message, ...] = ({}, {"content": None}, {"content": ""})


class Renders(NamedTuple):
    """The parts of a chat with tools that a template writes into the prompt."""

    tools: bool  # the functions that the model may call
    calls: bool  # of earlier answers, with their arguments
    results: bool  # messages of the role tool


class CallForm(NamedTuple):
    """How a message with calls and without text is written."""

    absent: Message  # its content, as ``{}`` or ``{"content": ...}``
    as_text: bool  # the arguments are text, else an object


class TemplateProbes:
    """The forms that one template accepts. Each probe runs once, when a chat first needs it."""

    def __init__(
        self, source: str, render: Callable[[Sequence[Message], Mapping[str, Any]], str]
    ) -> None:
        """``render`` renders a chat with further variables by the template, whose text is
        ``source``; it raises ``TokenizerError`` if that fails.
        """
        self._source = source
        self._render = render
        self._rendered_chats: dict[str, str | None] = {}
        self.takes_guidance = cache(self._takes_guidance)
        self.needs = cache(self._needs)
        self.joins = cache(self._joins)

    def names(self, role: str) -> bool:
        """True if the template's source has the role as a text."""
        return any(f"{quote}{role}{quote}" in self._source for quote in "'\"")

    def guidance_role(self, role: str) -> str:
        """The role of the system's or the developer's messages in a chat: the developer is the
        system where the template has no role for developers.
        """
        knows_developer = self.names("developer") and self.takes_guidance("developer")
        return "system" if role == "developer" and not knows_developer else role

    @cached_property
    def renders(self) -> Renders:
        """Which parts of a chat with tools the prompt contains."""
        history = (_QUESTION, _call(*self.call_form), _result(), _ANSWER, _QUESTION)
        texts = [self._probe(*history, tools=tools) for tools in self._tools]
        # a template that refuses calls may write results
        without_call = self._probe(_QUESTION, _ANSWER, _result(), _QUESTION)
        return Renders(
            tools=PROBE_FUNCTION in (self._probe(_QUESTION, tools=[_probe_tool()]) or ""),
            calls=any(_shows(text, _VALUE) for text in texts),
            results=any(_shows(text, _WORDS[0]) for text in (*texts, without_call)),
        )

    # messages

    @cached_property
    def no_tools(self) -> list[Any] | None:
        """The value of ``tools`` in a chat without tools: null as in transformers, or an empty list
        for a template that iterates over it.
        """
        fails = {
            is_none: self._rendered([_QUESTION], None if is_none else []) is None
            for is_none in (True, False)
        }
        return [] if fails[True] and not fails[False] else None

    @cached_property
    def takes_questions(self) -> bool:
        """True if the template renders a user's message without further variables."""
        return self._shown([_QUESTION])

    @cached_property
    def call_form(self) -> CallForm:
        """How a message with tool calls is written.

        Templates that concatenate the arguments need them as text, others iterate over them or
        write them by ``tojson``; one that accepts both gets the object, as in vLLM. Some templates
        test whether the content is null before they write the calls.
        """
        forms = [CallForm(absent, as_text) for as_text in (False, True) for absent in _ABSENT]
        return self._best(forms, lambda form: _call(*form), shown=_VALUE)

    @cached_property
    def absent_content(self) -> Message:
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
        answered = [_result(), _ANSWER] if "tool_calls" in message else []
        followed = (_QUESTION, message, *answered, _QUESTION)
        return [
            self._probe(_QUESTION, message),
            *(self._probe(*followed, tools=tools) for tools in self._tools),
        ]

    @cached_property
    def splits_text(self) -> bool:
        """True if text beside a call needs a message of its own before it: the template writes only
        one of the two, and both of two messages.
        """
        call, text = _call(*self.call_form), {"role": "assistant", "content": _WORDS[1]}
        together = [_QUESTION, {**call, **text}, _result()]
        apart = [_QUESTION, text, call, _result()]
        followed = [*apart, _ANSWER, _QUESTION]
        shows_apart = all(self._shown(chat, _VALUE, _WORDS[1]) for chat in (apart, followed))
        return shows_apart and not self._shown(together, _VALUE, _WORDS[1])

    @cached_property
    def joins_thoughts(self) -> bool:
        """True if text and thoughts beside a call must be one text: the template refuses both
        fields, as gpt-oss's does, which writes either as thoughts.
        """
        call, text = _call(*self.call_form), {"content": _WORDS[1]}
        thoughts = {name: _WORDS[2] for name in ("thinking", "reasoning_content")}

        def shown(fields: Message) -> bool:
            return self._shown([_QUESTION, {**call, **fields}, _result()], _VALUE, _WORDS[1])

        return not shown({**text, **thoughts}) and shown(text)

    @cached_property
    def splits_calls(self) -> bool:
        """True if each call needs a message of its own: the template refuses or leaves out a
        second one.
        """
        first, second = (_call(*self.call_form, number=number) for number in (0, 1))
        calls = [*first["tool_calls"], *second["tool_calls"]]
        both = {**first, "tool_calls": calls}
        values = (_VALUE, f"{_VALUE}1")
        results = _result(), _result(number=1)
        apart = [_QUESTION, first, results[0], second, results[1]]
        followed = [*apart, _ANSWER, _QUESTION]
        shows_apart = all(self._shown(chat, *values) for chat in (apart, followed))
        return shows_apart and not self._shown([_QUESTION, both, *results], *values)

    @cached_property
    def limits_ids(self) -> bool:
        """True if the template takes ids of calls that are nine letters and digits, as Mistral's
        are, and refuses those of other servers.
        """

        def shown(call_id: str) -> bool:
            call, result = _call(*self.call_form), {**_result(), "tool_call_id": call_id}
            calls = [{**one, "id": call_id} for one in call["tool_calls"]]
            return self._shown([_QUESTION, {**call, "tool_calls": calls}, result], _VALUE)

        return shown(_IDS[0]) and not shown(f"call_{_IDS[0]}")

    @cached_property
    def needs_names(self) -> bool:
        """True if a result needs the name of its function, which OpenAI's clients do not send:
        without it the template fails, or writes a word for nothing in its place, as Gemma's.
        """
        unnamed = {key: value for key, value in _result().items() if key != "name"}
        for tools in self._tools:
            named, without = (
                self._probe(_QUESTION, _call(*self.call_form), one, tools=tools)
                for one in ({**unnamed, "name": _NAME}, unnamed)
            )
            words = [] if named is None else [named.replace(_NAME, word) for word in _NO_NAMES]
            if named is not None and (without is None or (_NAME in named and without in words)):
                return True
        return False

    @cached_property
    def roles_with_parts(self) -> frozenset[str]:
        """The roles whose content the template accepts as parts and writes in full."""
        before: dict[str, list[Mapping[str, Any]]] = {
            "system": [],
            "user": [],
            "assistant": [_QUESTION],
            "tool": [_QUESTION, _call(*self.call_form)],
        }
        after = {"system": [_QUESTION]}
        parts = [{"type": "text", "text": words} for words in _WORDS[:2]]
        roles = set[str]()
        for role, earlier in before.items():
            message = {**(_result() if role == "tool" else {"role": role}), "content": parts}
            text = self._probe(*earlier, message, *after.get(role, [])) or ""
            # a list that was printed by its repr shows its keys
            shows_keys = f"'text': '{_WORDS[0]}'" in text or f'"text": "{_WORDS[0]}"' in text
            if all(words in text for words in _WORDS[:2]) and not shows_keys:
                roles.add(role)
        return frozenset(roles)

    def _takes_guidance(self, *roles: str, later: bool = False) -> bool:
        """True if the template writes messages of these roles at the beginning of a chat; the last
        one ``later``, between an answer and a question. Also if it cannot be probed: some need
        variables.
        """
        if not self.takes_questions:
            return True
        messages = [
            {"role": role, "content": words} for role, words in zip(roles, _WORDS, strict=False)
        ]
        chat = [*messages, _QUESTION]
        if later:
            chat = [*messages[:-1], _QUESTION, _ANSWER, messages[-1], _QUESTION]
        return self._shown(chat, *_WORDS[: len(roles)])

    def _joins(self, first: str, second: str) -> bool:
        """True if a message of the role ``second`` right after one of ``first`` must be part of it:
        the template refuses or drops one of the two, as those do whose roles must alternate.
        """
        before: Mapping[str, list[Mapping[str, Any]]] = {
            "assistant": [_QUESTION],
            "tool": [_QUESTION, _call(*self.call_form)],
        }
        own = _result() if first == "tool" else {"role": first, "content": _WORDS[0]}
        other = {"role": second, "content": _WORDS[1]}
        joined = {**own, "content": "\n\n".join(_WORDS[:2])}
        after = [_QUESTION] if second == "assistant" else []

        def shown(*messages: Mapping[str, Any]) -> bool:
            return self._shown([*before.get(first, []), *messages, *after], *_WORDS[:2])

        return not shown(own, other) and shown(joined)

    # tools

    def _needs(self, lacking: str, filled: str) -> bool:
        """True if the template renders the function ``filled`` (as JSON), but not ``lacking``."""

        words = [word for word in (PROBE_FUNCTION, PROBE_KEY) if word in lacking]

        def shown(function: str) -> bool:
            text = self._probe(_QUESTION, tools=[_tool(json.loads(function))]) or ""
            return all(word in text for word in words)

        return not shown(lacking) and shown(filled)

    # rendering

    @property
    def _tools(self) -> Iterable[list[Any] | None]:
        """Without tools and with one: some templates write calls only beside tools."""
        return (self.no_tools, [_probe_tool()])

    def _shown(self, chat: Sequence[Mapping[str, Any]], *words: str) -> bool:
        """True if a prompt of the chat has all the words."""
        return any(_shows(self._probe(*chat, tools=tools), *words) for tools in self._tools)

    def _probe(self, *messages: Mapping[str, Any], tools: list[Any] | None = None) -> str | None:
        """A chat rendered by the template; None if it refuses or fails."""
        return self._rendered(messages, tools or self.no_tools)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
    ) -> str | None:
        chat = [dict(message) for message in messages]
        key = json.dumps([chat, tools])  # several probes render the same chats
        if key not in self._rendered_chats:
            try:
                self._rendered_chats[key] = self._render(chat, {"tools": tools})
            except TokenizerError:
                self._rendered_chats[key] = None
        return self._rendered_chats[key]


def _probe_tool() -> Mapping[str, Any]:
    properties = {PROBE_KEY: {"type": "string", "description": "a key"}}
    parameters = {"type": "object", "properties": properties, "required": [PROBE_KEY]}
    return _tool({"name": PROBE_FUNCTION, "description": "a probe", "parameters": parameters})


def _tool(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": function}


def _call(absent: Message, as_text: bool, number: int = 0) -> Message:
    arguments = {PROBE_KEY: _VALUE + str(number or "")}
    function = {
        "name": PROBE_FUNCTION,
        "arguments": json.dumps(arguments) if as_text else arguments,
    }
    call = {"id": _IDS[number], "type": "function", "function": function}
    return {"role": "assistant", **absent, "tool_calls": [call]}


def _result(number: int = 0) -> Message:
    return {
        "role": "tool",
        "name": PROBE_FUNCTION,
        "tool_call_id": _IDS[number],
        "content": _WORDS[0],
    }


def _nulls(text: str | None) -> int:
    """How many nulls the text contains, in Python's or JSON's spelling."""
    return 0 if text is None else text.count("None") + text.count("null")


def _shows(text: str | None, *words: str) -> bool:
    """True if the text has the words, and no object in Python's form or as text within text."""
    printed = (f"'{PROBE_KEY}'", f'\\"{PROBE_KEY}')
    return (
        text is not None
        and all(word in text for word in words)
        and not any(form in text for form in printed)
    )
