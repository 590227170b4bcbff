"""Chat templates: a list of messages becomes one prompt string.

Owns: the Jinja environment, as Hugging Face's transformers defines it, and the checks of messages.
Must not know: token ids. The clock comes from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.core.errors import RequestError, TokenizerError

# Put after the final message to find where it ends. The trailing space shows whether the template
# strips messages.
_END_MARK = "<jaxinfer end of the final message> "


class _Generation(Extension):
    """Accepts ``{% generation %}...{% endgeneration %}``, which marks text for training masks."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template, run in a sandbox: a template comes with the model and is untrusted."""

    def __init__(self, source: str, clock: Callable[[], datetime] = datetime.now) -> None:
        """Raises ``TokenizerError`` with Jinja's message when the source is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"The chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render ``messages``, which ``check_messages`` describes.

        ``add_generation_prompt`` opens the assistant's turn; ``continue_final_message`` instead
        leaves the final message open, so that the model goes on with it. ``variables`` are extra
        names for the template (special tokens, tools, ``enable_thinking``).

        Raises ``RequestError`` for bad messages or options, ``TokenizerError`` with the template's
        own message when it refuses or fails.
        """
        chat = check_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other; "
                    "set one of them to false."
                )
            chat[-1]["content"] = (chat[-1].get("content") or "") + _END_MARK
        names = {"tools": None, "documents": None, **(variables or {})}
        names |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(names)
        except Exception as error:  # a template is a program: it can fail in any way
            raise TokenizerError(f"The chat template failed: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy ``messages`` with each content as one string; lists of text parts join by newlines.

    A message is a mapping with a string ``role`` and ``content``: a string, or a list of
    ``{"type": "text", "text": ...}``. Only a message with ``tool_calls`` may leave content out.
    Other keys pass through to the template. Raises ``RequestError`` naming the message.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message.")
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content.")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where}.role must be a string.")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            chat.append(dict(message))
        else:
            chat.append({**message, "content": _content_text(where, content)})
    return chat


def _content_text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of text parts.")
    texts: list[str] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise RequestError(
                    f'{where}.content[{index}] must be {{"type": "text", "text": a string}}; '
                    "other kinds of content are not supported."
                )
    return "\n".join(texts)


def _cut_at_mark(text: str) -> str:
    """Cut a rendered chat where its final message ends, stripped if the template strips."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise TokenizerError(
            "The chat template leaves out the final message, so it cannot be continued; "
            "use add_generation_prompt instead."
        )
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a model must not see.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
