"""Chat templates: render a list of messages as one prompt string, as transformers does."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.core.errors import ContextLengthError, RequestError, TokenizerError
from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.chat_forms import adapted_messages, adapted_tools, with_system
from jaxinfer.text.messages import Message, check_messages
from jaxinfer.text.template_probes import Renders, TemplateProbes
from jaxinfer.text.tool_texts import with_texts
from jaxinfer.text.tools import check_tools

MAX_COMPILED_TEMPLATES = 16  # more than a model has; requests may bring their own
MAX_CHARACTERS = 1 << 26  # of a prompt, where the context's length does not say less
# Variables that count as absent if they are empty: templates test them with ``is not none``.
_LISTS = ("tools", "documents")
# Appended to the final message to find its end. The trailing space shows whether the template
# strips messages.
_END_MARK = "<jaxinfer end of the final message> "


class ChatTemplate:
    """One compiled template, run in a sandbox: a template comes with the model and is untrusted."""

    def __init__(
        self,
        source: str,
        clock: Callable[[], datetime] = datetime.now,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``special_tokens`` are variables for the template, such as ``bos_token``.

        Raises ``TokenizerError`` with Jinja's message if the source is not a template.
        """
        self._special_tokens = special_tokens
        # the word of Hunyuan's template for OpenAI's effort ``none``
        self._no_effort = "no_think" if re.search("['\"]no_think['\"]", source) else "none"
        self._probes = TemplateProbes(
            source,
            lambda chat, variables: self._text(
                chat, {"add_generation_prompt": False, **variables}, MAX_CHARACTERS
            ),
        )
        from jaxinfer.text.jinja import Program  # not at a start: it takes 0.1 s

        self._program = Program(source, clock)

    @property
    def renders(self) -> Renders:
        """Which parts of a chat with tools the template writes; found by rendering small chats."""
        return self._probes.renders

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        max_characters: int = MAX_CHARACTERS,
        calls: CallText | None = None,
    ) -> str:
        """Render ``messages`` (see ``check_messages``) in the form that the template accepts.

        ``add_generation_prompt`` opens the assistant's message. ``continue_final_message`` instead
        leaves the final message open, so that the model continues it. ``variables`` are extra
        variables for the template (tools, ``enable_thinking``); empty tools and documents count as
        absent. Tools, calls and results that the template does not write are text in the form
        ``calls``; without one they are left to the template.

        Raises ``RequestError`` for invalid messages or options, ``ContextLengthError`` for a prompt
        of more than ``max_characters``, and ``TokenizerError`` with the template's own message if
        it refuses or fails.
        """
        given = {key: one for key, one in (variables or {}).items() if one or key not in _LISTS}
        chosen = {**given, "add_generation_prompt": add_generation_prompt}
        if given.get("reasoning_effort") == "none":
            chosen["reasoning_effort"] = self._no_effort
        check_tools(given.get("tools", ()))
        checked = check_messages(messages)
        if calls is not None:
            checked = self._with_texts(checked, chosen, calls, continues=continue_final_message)
        chat = adapted_messages(self._probes, checked)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other; "
                    "set one of them to false."
                )
            if chat[-1].get("tool_calls"):  # they would be cut off with the text after the mark
                raise RequestError(
                    f"messages[{len(messages) - 1}] has calls, so continue_final_message cannot be "
                    "used; send the results of the calls, or leave either out."
                )
            chat[-1]["content"] = _with_end_mark(chat[-1].get("content"))
        tools = adapted_tools(self._probes, chosen.pop("tools", ()))

        def rendered(chat: Sequence[Message], tools: Sequence[Any] = tools) -> str:
            all_variables = {**chosen, "tools": tools or self._probes.no_tools}
            return self._text(chat, all_variables, max_characters)

        try:
            text = rendered(chat)
        except TokenizerError as error:
            raise self._located(error, rendered, checked, chat, tools) from None
        return _text_before_mark(text) if continue_final_message else text

    def _located(
        self,
        error: TokenizerError,
        rendered: Callable[[Sequence[Message], Sequence[Any]], str],
        checked: Sequence[Message],  # the chat before it was adapted
        chat: Sequence[Message],
        tools: Sequence[Any],
    ) -> TokenizerError:
        """The error naming the tool or message that the template's code cannot render; the same
        one if the template refuses the chat in its own words.
        """
        from jaxinfer.text.jinja import is_deliberate, reason

        cause = error.__cause__
        if cause is None or is_deliberate(cause) or not self._probes.takes_questions:
            return error

        def fails(chat: Sequence[Message], tools: Sequence[Any]) -> bool:
            try:
                rendered(chat, tools)
            except TokenizerError:
                return True
            except ContextLengthError:
                return False
            return False

        if tools and not fails(chat, ()):
            number = _first(len(tools), lambda count: fails(chat, tools[:count]))
            name, remedy = "tools", "describe it more simply"
        else:
            prefix = partial(adapted_messages, self._probes)
            number = _first(len(checked), lambda count: fails(prefix(checked[:count]), tools))
            name, remedy = "messages", "send it in a simpler form"
        return TokenizerError(
            f"The chat template failed: it cannot render {name}[{number}] "
            f"({reason(cause).rstrip('.')}); {remedy}, or leave it out."
        )

    def _with_texts(
        self, chat: list[Message], variables: dict[str, Any], calls: CallText, *, continues: bool
    ) -> list[Message]:
        """The chat with what the template does not write as text; takes such tools out of the
        ``variables``.
        """
        tools = variables.get("tools") or ()
        if not tools and not any(one["role"] == "tool" or "tool_calls" in one for one in chat):
            return chat
        if tools and calls.is_generic:
            if continues:
                raise RequestError(
                    "continue_final_message cannot be used with tools, since each answer of this "
                    "model to a chat with tools is one JSON object; leave either out."
                )
            renders = Renders(tools=False, calls=False, results=False)
        else:
            renders = self._probes.renders
        if not renders.tools:
            variables.pop("tools", None)
        return with_system(self._probes, with_texts(chat, tools, calls, renders), chat)

    def _text(
        self, chat: Sequence[Message], variables: Mapping[str, Any], max_characters: int
    ) -> str:
        from jaxinfer.text.jinja import reason

        defaults = {**dict.fromkeys(_LISTS), **self._special_tokens}
        try:
            text = self._program.run({**defaults, **variables, "messages": chat}, max_characters)
        except Exception as error:  # a template is a program: it can raise anything
            raise TokenizerError(f"The chat template failed: {reason(error)}") from error
        if text is None:
            raise ContextLengthError(
                f"The chat has more than {max_characters} characters as a prompt; shorten it."
            )
        return text


def _first(length: int, fails: Callable[[int], bool]) -> int:
    """The index of the item with which a list of ``length`` items fails, by bisection: ``fails`` of
    a number of its first items.
    """
    return bisect_left(range(1, length), True, key=fails)


def _with_end_mark(content: str | list[Mapping[str, Any]] | None) -> str | list[Mapping[str, Any]]:
    if isinstance(content, list):
        *parts, last = content
        return [*parts, {**last, "text": last["text"] + _END_MARK}]
    return (content or "") + _END_MARK


def _text_before_mark(text: str) -> str:
    """Cut a rendered chat at the end of its final message, stripped if the template strips."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise TokenizerError(
            "The chat template leaves out the final message, so it cannot be continued; "
            "use add_generation_prompt instead."
        )
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
