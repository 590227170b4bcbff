"""The formats of answers by name, and the one that a chat template writes.

A format is a file in ``templates``: a ``response_template`` and, for calls, the text around a call
that a grammar writes. Names are those of vLLM's parsers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import regex

from jaxinfer.core.errors import ConfigError
from jaxinfer.text.answers.template import ResponseTemplate, read_template

NONE = "none"  # the name of no parser
GENERIC = "generic"  # the format of calls for templates without a known one
# The first whose texts are all in the chat template is the format of its answers. qwen3_coder is
# before hermes, whose marks it has too.
FORMATS = (
    *("openai", "gemma4", "functiongemma", "kimi_k2", "deepseek_v4", "deepseek_v32", "deepseek_v3"),
    *(
        "deepseek_v31",
        "mistral_v11",
        "mistral",
        "seed_oss",
        "cohere_command",
        "apertus",
        "minimax_m3",
        "minimax_m2",
        "pangu",
        "step3",
        "qwen3_coder",
        "glm45",
        "longcat",
        "hermes",
        "minimax",
        "llama3_json",
        "pythonic",
    ),
    "think",
)
_NAMES = (*FORMATS, GENERIC)
_TOOL_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{"qwen3_xml": "qwen3_coder", "qwen": "hermes", "qwen3": "hermes", "qwen25": "hermes"},
        **{"llama4_pythonic": "pythonic", "gpt_oss": "openai", "harmony": "openai"},
        **{"llama4_json": "llama3_json", "llama3": "llama3_json", "glm47": "glm45"},
        "minimax_m1": "minimax",
        **{"cohere_command3": "cohere_command", "cohere_command4": "cohere_command"},
    }
)
_REASONING_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "holo2"), "think"
        ),
        **{"openai_gptoss": "openai", "gpt_oss": "openai", "harmony": "openai"},
        **{"cohere_command3": "cohere_command", "cohere_command4": "cohere_command"},
    }
)
_LAST_MARK = regex.compile(r"<[^<>]+>\s*\Z")
# where an answer begins in the prompts of the usual chat templates
_START = (
    r"<\|im_start\|>assistant\n|<｜Assistant｜>|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
    r"|<\|header_start\|>assistant<\|header_end\|>\n\n|\[/INST\]|<\|im_assistant\|>assistant"
    r"<\|im_middle\|>|<\|?turn>model\n|<start_of_turn>model\n|<\|assistant\|>\n?|<\|start\|>assistant"
    r"|<seed:bos>assistant\n|\]~b\]ai\n|<\|CHATBOT_TOKEN\|>|<\|assistant_start\|>|\[unused9\]助手："
)


@dataclass(frozen=True)
class CallText:
    """How calls are written: the text around each call's arguments, as a grammar needs it.

    ``{name}`` and ``{index}`` stand for the function's name and the number of the call. ``style``
    is the form of the arguments: ``json``, ``tags`` with the text around each argument, in which
    ``{string}`` says whether it is text, or ``pairs``: see ``text.grammar.arguments``.
    """

    begin: str
    end: str
    separator: str = ""
    before: str = ""  # the first call
    after: str = ""  # the last one
    style: str = "json"
    argument_begin: str = ""
    argument_end: str = ""
    key_end: str = ""  # of pairs
    argument_separator: str = ""
    quotes: Sequence[str] = ()  # around texts; none: the values of pairs are JSON
    call_id: str = ""  # empty: an id that all templates accept
    # texts that begin calls in an answer; or the form of an answer without calls, where its first
    # character tells the two apart (elements of a structural tag)
    triggers: Sequence[str] = ()
    without_calls: Sequence[Mapping[str, Any]] = ()
    # around an answer to the user, which is then a JSON string: each answer has a form, and is one
    # call or none
    answer_begin: str = ""
    answer_end: str = ""

    @property
    def marks(self) -> tuple[str, str]:
        """The marks that begin and end a call, or all calls; empty if there are none."""
        end = _LAST_MARK.search(self.after or self.end)
        return (self.triggers[0] if self.triggers else "", end[0].strip() if end else "")

    @property
    def is_generic(self) -> bool:
        """True if no chat template writes such calls, so that messages have them as text."""
        return bool(self.answer_begin)


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers. ``calls`` None: calls are not enforced by a grammar."""

    name: str
    template: ResponseTemplate
    calls: CallText | None = None
    think_begin: str = ""  # the marks of the model's thoughts; empty if they have none
    think_end: str = ""
    answer_begin: str = ""  # the mark before the content, where that has one
    is_sure: bool = True  # False: nothing but the name of a parser shows that the model thinks

    @property
    def has_reasoning(self) -> bool:
        """True if thoughts are told from content."""
        return any(one.has_reasoning for one in self.template.fields)

    @property
    def thinks(self) -> bool:
        """True if the model can be asked for thoughts."""
        return self.has_reasoning and self.is_sure

    @property
    def has_calls(self) -> bool:
        """True if calls are found."""
        return any(one.has_calls for one in self.template.fields)

    def without_calls(self) -> AnswerFormat:
        """The format for a request without tools."""
        template = self.template.only(lambda one: not one.has_calls)
        return replace(self, template=template, calls=None)

    @property
    def is_generic(self) -> bool:
        """True if each answer is a call or an answer to the user, as a grammar has it."""
        return self.calls is not None and self.calls.is_generic

    def without_text(self) -> AnswerFormat:
        """The format in which text that no mark opens is no content."""
        return replace(self, template=self.template.only(lambda one: one.open is not None))

    def with_marked_calls(self) -> AnswerFormat:
        """The format in which text without the marks of a call is none."""
        return replace(self, template=self.template.only(lambda one: not one.is_answer))

    def without_reasoning(self) -> AnswerFormat:
        """The format in which thoughts are content."""
        template = self.template.only(lambda one: not one.has_reasoning)
        return replace(self, template=template, think_begin="", think_end="")


def answer_format(
    chat_template: str,
    response_template: Any = None,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    with_tools: bool = False,
    special_tokens: Container[str | None] = (),
) -> AnswerFormat | None:
    """The format of answers to a chat template's prompts; None if they are plain text.

    ``response_template`` is that of the model's tokenizer, which replaces the found one; the names
    of parsers replace either, ``none`` its part. ``with_tools``: the chat has some, so that a
    template without a known format of calls gets the generic one. ``special_tokens`` are
    the tokenizer's: a model whose chat template does not show whether it thinks, as Mistral's
    often do not, does if the mark of thoughts is a token. Raises ``ConfigError`` for an
    unknown name and ``TokenizerError`` for an unusable ``response_template``.
    """
    found = _found(chat_template, special_tokens)
    if response_template is not None:
        name, template = "response_template", read_template(response_template)
        # its marks are patterns, so those that a grammar writes are the found format's
        found = replace(found or AnswerFormat(name, template), name=name, template=template)
    if tool_call_parser == NONE:
        found = None if found is None else found.without_calls()
    elif tool_call_parser is not None:
        found = _read(_known(tool_call_parser, _TOOL_ALIASES, "tool_call_parser"))
        if not _thinks(found.name, chat_template, special_tokens):
            # thoughts are still read; a form lets none begin
            found = replace(found, think_begin="", think_end="", is_sure=False)
    elif with_tools and not (found is not None and found.has_calls):
        generic = _read(GENERIC)
        found = generic if found is None else _with_reasoning(generic, found)
    if reasoning_parser == NONE:
        found = None if found is None else found.without_reasoning()
    elif reasoning_parser is not None:
        thoughts = _read(_known(reasoning_parser, _REASONING_ALIASES, "reasoning_parser"))
        found = thoughts if found is None else _with_reasoning(found, thoughts)
    if found is not None and found.has_reasoning and _thinks_first(reasoning_parser, chat_template):
        found = replace(found, template=replace(found.template, thinks_first=True))
    return found if found is not None and (found.has_calls or found.has_reasoning) else None


def _found(chat_template: str, special_tokens: Container[str | None]) -> AnswerFormat | None:
    """The first format whose marks the chat template has."""
    for name in FORMATS:
        declared = _declared(name)
        if all(text in chat_template for text in declared["found_by"]):
            found = _read(name)
            thinks = _thinks(name, chat_template, special_tokens)
            return found if thinks else found.without_reasoning()
    return None


def _thinks(name: str, chat_template: str, special_tokens: Container[str | None]) -> bool:
    """True if a model of this template, with answers in this format, may think."""
    declared = _declared(name)
    if declared.get("thinks_in_tokens", False) and declared["think"][0] in special_tokens:
        return True
    return declared.get("thinks_if", "") in chat_template


def _with_reasoning(found: AnswerFormat, thoughts: AnswerFormat) -> AnswerFormat:
    kept = found.without_reasoning().template
    own = _read(found.name) if found.name in FORMATS else found
    # those of the format itself know its calls, too
    marks = own if own.think_end == thoughts.think_end else thoughts
    added = marks.template.only(lambda one: one.has_reasoning).fields
    return replace(
        found,
        template=replace(kept, fields=(*added, *kept.fields)),
        think_begin=thoughts.think_begin,
        think_end=thoughts.think_end,
        is_sure=thoughts.is_sure,
    )


def _thinks_first(reasoning_parser: str | None, chat_template: str) -> bool:
    """True if each answer begins with thoughts, also without a mark that opens them: as vLLM's
    parser of this name has it, or where the chat template knows only the mark that ends them.
    """
    return reasoning_parser == "deepseek_r1" or (
        reasoning_parser is None and "</think>" in chat_template and "<think>" not in chat_template
    )


def _known(name: str, aliases: Mapping[str, str], setting: str) -> str:
    found = aliases.get(name, name)
    if found not in _NAMES:
        names = ", ".join((*_NAMES, NONE))
        raise ConfigError(f"{setting} {name!r} is unknown; use one of {names}")
    return found


@cache
def _read(name: str) -> AnswerFormat:
    declared = _declared(name)
    template = read_template({"start_anchor_pattern": _START, "fields": declared["fields"]})
    calls = CallText(**declared["calls"]) if "calls" in declared else None
    begin, end = declared.get("think", ("", ""))
    return AnswerFormat(name, template, calls, begin, end, declared.get("answer", ""))


@cache
def _declared(name: str) -> Mapping[str, Any]:
    folder = resources.files("jaxinfer.text.answers.templates")
    own = tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))
    return {**_declared(own["extends"]), **own} if "extends" in own else own
