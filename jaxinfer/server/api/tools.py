"""The tools of a chat request, checked, and how its answer is read for calls and thoughts."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec
import regex

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams, Thinking
from jaxinfer.server.api.fields import field_error
from jaxinfer.text.answers.formats import AnswerFormat
from jaxinfer.text.answers.parser import AnswerParser
from jaxinfer.text.answers.structure import as_element, calls_or, calls_tag, form_of_tag, strict_tag
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.tools import wrong_type

MAX_TOOLS = 1024
MAX_NAME_CHARACTERS = 256  # of a function
NAME_ENDS = frozenset('"\\<>[]{}')  # in some form of calls each of them ends or escapes a name
ID_CHARACTERS = 9  # of a call's id: the templates of Mistral accept no other length


@dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may call. ``mode``: auto, none, or required (at least one call)."""

    mode: Literal["auto", "none", "required"] = "none"
    tools: tuple[Mapping[str, Any], ...] = ()  # as the client sent them, of a named choice one
    is_named: bool = False  # exactly one call, of the function that the choice names

    @property
    def functions(self) -> Mapping[str, Mapping[str, Any]]:
        """The functions by name."""
        return {tool["function"]["name"]: tool["function"] for tool in self.tools}

    @property
    def custom(self) -> frozenset[str]:
        """The names of functions that stand for custom tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools if "custom" in tool)

    @property
    def has_strict(self) -> bool:
        """True if the arguments of a function must follow its schema."""
        return any(function.get("strict") is True for function in self.functions.values())


def tool_choice(tools: Sequence[Any] | None, choice: Any) -> ToolChoice:
    """The choice of a request; raises ``ApiError`` naming the field that is wrong."""
    named = _checked_tools(tools or ())
    if choice is None:
        choice = "auto" if named else "none"
    match choice:
        case "none":
            return ToolChoice()
        case "auto":
            return ToolChoice("auto" if named else "none", tuple(named.values()))
        case "required":
            if not named:
                raise field_error("tool_choice", "tool_choice is required, but tools is empty")
            return ToolChoice("required", tuple(named.values()))
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            if name not in named:
                raise field_error(
                    "tool_choice",
                    f"tool_choice names the function {name[:MAX_NAME_CHARACTERS]!r}, which is not "
                    "in tools",
                )
            return ToolChoice("required", (named[name],), is_named=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
        }:
            return ToolChoice(mode, tuple(_allowed(named, cast("list[Any]", allowed))))
        case _:
            raise field_error(
                "tool_choice",
                "tool_choice must be none, auto, required, "
                '{"type": "function", "function": {"name": a function of tools}} or {"type": '
                '"allowed_tools", "allowed_tools": {"mode": auto or required, "tools": [...]}}',
            )


def _allowed(
    named: Mapping[str, Mapping[str, Any]], allowed: Sequence[Any]
) -> Iterator[Mapping[str, Any]]:
    """Those of the tools, in their order, that ``allowed_tools`` lists."""
    names = set[str]()
    for number, one in enumerate(allowed):
        match one:
            case {"type": "function", "function": {"name": str(name)}} if name in named:
                names.add(name)
            case _:
                where = f"tool_choice.allowed_tools.tools[{number}]"
                raise field_error(where, f"{where} must name a function of tools")
    yield from (tool for name, tool in named.items() if name in names)


def _checked_tools(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """The tools by name, in order."""
    if len(tools) > MAX_TOOLS:
        raise field_error("tools", f"tools must have at most {MAX_TOOLS} items, got {len(tools)}")
    named: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise field_error(f"{where}.type", f"{where}.type must be function, got {kind!r:.60}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise field_error(f"{where}.function", f"{where}.function must be an object")
        check_function(f"{where}.function", cast("Mapping[str, Any]", function), named)
        named[function["name"]] = cast("Mapping[str, Any]", tool)
    return named


def check_function(where: str, function: Mapping[str, Any], others: Container[str]) -> None:
    """Raise ``ApiError`` if the function at the path ``where`` has a wrong field, or the name of
    one of the ``others`` in the request.
    """
    name = function.get("name")
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_NAME_CHARACTERS
        or name.split() != [name]
        or not name.isprintable()
        or not NAME_ENDS.isdisjoint(name)
    ):
        raise field_error(
            f"{where}.name",
            f"{where}.name must be printable text of at most {MAX_NAME_CHARACTERS} characters, "
            f"with neither spaces nor any of {' '.join(sorted(NAME_ENDS))}",
        )
    if name in others:
        raise field_error(f"{where}.name", f"{where}.name {name!r} is the name of another tool")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise field_error(
            f"{where}.parameters", f"{where}.parameters must be a JSON schema, an object"
        )
    if wrong := wrong_type(f"{where}.parameters", function.get("parameters")):
        raise field_error(wrong.path, wrong.reason)
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise field_error(f"{where}.description", f"{where}.description must be text")


@dataclass(frozen=True)
class AnswerReading:
    """How the text of one request's answers is read; each answer has its own parser."""

    format: AnswerFormat
    prompt: str  # the rendered chat
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    hidden: regex.Pattern[str] | None = None  # special tokens that no text shows
    parallel: bool = True  # False: only the first call of an answer counts
    num_earlier_calls: int = 0  # in the messages
    custom: frozenset[str] = frozenset()  # functions that stand for custom tools
    content_is_last: bool = False  # its form holds up to the end, and may contain any mark

    def constrained(
        self, sampling: SamplingParams, choice: ToolChoice, budget: int | None, tokenizer: Tokenizer
    ) -> SamplingParams:
        """The sampling parameters of the answers: calls that are required are enforced, and so are
        the arguments of strict functions; forms, stop strings and the ``budget`` of thoughts follow
        the format's marks. Raises ``ApiError``.
        """
        form, calls = sampling.structured_outputs, self.format.calls
        structured = form
        functions, parallel = list(choice.functions.values()), self.parallel
        tag: dict[str, Any] | None = None
        if choice.mode == "required":
            if form is not None:
                raise field_error(
                    "tool_choice",
                    "tool_choice requires a call, which has its own form; leave out "
                    "response_format and structured_outputs",
                )
            if calls is None:
                raise field_error(
                    "tool_choice",
                    f"calls in the form {self.format.name} cannot be required; use auto",
                )
            tag = calls_tag(calls, functions, parallel=parallel)
        elif calls is not None and form is not None and functions:
            tag = calls_or(self._content(form), calls, functions, parallel=parallel)
        elif calls is not None and (calls.is_generic or choice.has_strict) and form is None:
            tag = strict_tag(calls, functions, parallel=parallel)
        if tag is not None:
            structured = form_of_tag(tag, form)
        has_form = form is not None and tag is None  # after the mark of the content
        # the marks of calls and thoughts may be special tokens
        changed = {"structured_outputs": structured, "skip_special_tokens": False}
        if structured is not None or budget is not None or sampling.stop:
            changed["thinking"] = self._thinking(budget, tokenizer, has_form=has_form)
        return msgspec.structs.replace(sampling, **changed)

    def _content(self, form: StructuredOutputsParams) -> Mapping[str, Any]:
        """The form of the content, with the mark before it, as a part of a structural tag."""
        element = as_element(form)
        mark = "" if self.parser().in_content else self.format.answer_begin
        if not mark:
            return element
        return {"type": "sequence", "elements": [{"type": "const_string", "value": mark}, element]}

    def _thinking(
        self, budget: int | None, tokenizer: Tokenizer, *, has_form: bool
    ) -> Thinking | None:
        """The marks of thoughts in the answers, and of the content if that ``has_form``; None if
        the form begins at once.
        """

        def encoded(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        found, parser = self.format, self.parser()
        is_open, answer = parser.in_reasoning, found.answer_begin if has_form else ""
        if answer and parser.in_content:
            return None  # the prompt has begun the content
        begun, knows_start = found.template.begun_answer(self.prompt)
        begun = found.template.after_results(begun)  # after which the model may think again
        is_over = not is_open and (
            found.think_end in begun if knows_start else begun.rstrip().endswith(found.think_end)
        )
        thinks = bool(found.think_end) and not is_over
        if not thinks and not answer:
            return None
        calls = self.format.calls if self.tools else None
        call_begin, call_end = ("", "") if calls is None else calls.marks
        return Thinking(
            begin=encoded(found.think_begin) if thinks else (),
            end=encoded(found.think_end) if thinks else (),
            is_open=is_open,
            budget=budget,
            answer=encoded(answer),
            call_begin=encoded(call_begin),
            call_end=encoded(call_end),
        )

    def parser(self) -> AnswerParser:
        """A parser of one answer."""
        schemas = {name: _parameters(function) for name, function in self.tools.items()}
        return AnswerParser(
            self.format.template,
            self.prompt,
            tools=schemas,
            hidden=self.hidden,
            content_is_last=self.content_is_last,
        )

    def call_id(self, request_id: str, choice: int, number: int, name: str) -> str:
        """The id of a call, ``number`` in its answer; the same for the same request."""
        if self.format.calls is not None and (form := self.format.calls.call_id):
            index = str(self.num_earlier_calls + number)
            return form.replace("{name}", name).replace("{index}", index)
        digest = hashlib.sha256(f"{request_id} {choice} {number}".encode()).hexdigest()
        return digest[:ID_CHARACTERS]


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    return cast("Mapping[str, Any]", parameters) if isinstance(parameters, Mapping) else {}


def check_names(found: AnswerFormat | None, choice: ToolChoice) -> None:
    """Raise ``ApiError`` for a function with the name that answers without a call have."""
    if found is None or found.calls is None or not found.calls.is_generic:
        return
    for name in choice.functions:
        if f'"{name}"' in found.calls.answer_begin:
            raise field_error(
                "tools",
                f"a function of tools is named {name!r}, the name of this model's answers without "
                "a call; rename the function",
            )


def num_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of tool calls in a chat's messages."""
    listed = (message.get("tool_calls") for message in messages)
    return sum(len(cast("list[Any]", calls)) for calls in listed if isinstance(calls, list))


def hidden_pattern(special_tokens: Sequence[str | None]) -> regex.Pattern[str] | None:
    """A pattern of special tokens, which are not part of an answer's text."""
    texts = sorted({text for text in special_tokens if text}, key=len, reverse=True)
    if not texts:
        return None
    # a test of the first character keeps a search among hundreds of tokens short
    first = regex.escape("".join(sorted({text[0] for text in texts})), special_only=False)
    return regex.compile(f"(?=[{first}])(?:{'|'.join(map(regex.escape, texts))})")
