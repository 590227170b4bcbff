"""Structural tags as a Lark grammar: free text in which some parts have a form.

Both of vLLM's shapes are read: ``{"structures": [...], "triggers": [...]}``, and the newer
``{"format": {...}}``, whose types are those of xgrammar's structural tags. ``arguments`` and
``argument_text``, of calls that are not one JSON object, are jaxinfer's own, and so are the fields
``closed``, ``strict``, ``function`` and ``argument`` of schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.core.errors import RequestError
from jaxinfer.text.grammar.arguments import ArgumentsWriter, Form
from jaxinfer.text.grammar.patterns import ANY_TEXT, containing, either, is_empty, literal
from jaxinfer.text.grammar.prepared import not_followed, prepared
from jaxinfer.text.grammar.raw_text import text_expression
from jaxinfer.text.grammar.rules import RuleWriter
from jaxinfer.text.grammar.schema import check_schema
from jaxinfer.text.grammar.tag_fields import (
    NAME,
    endless_text,
    form_of,
    objects_of,
    text_of,
    texts_of,
    triggers_of,
    unusable_schema,
)

_KINDS = (
    "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags and "
    "tags_with_separator"
)


def tags_as_lark(
    tag: Any,
    special: Mapping[str, int],  # ids of special tokens by their text
    regex_to_lark: Callable[[str], str],
    options: Mapping[str, Any],  # llguidance's options of JSON schemas
) -> str:
    """The Lark grammar; raises ``RequestError`` for a tag of an unknown or incomplete form."""
    writer = _TagWriter(special, regex_to_lark, options)
    start = writer.expression(format_of(tag))
    return "\n".join(("%llguidance {}", f"start: {start}", *writer.rules, ""))


def format_of(tag: Any) -> Any:
    """The format of a tag in either shape; raises ``RequestError`` for one that is no object."""
    if not isinstance(tag, Mapping):
        raise RequestError(f"{NAME} must be an object")
    if "structures" not in tag:
        return tag.get("format")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end"),
        }
        for one in objects_of(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _TagWriter(RuleWriter):
    """Collects the rules of a grammar while it writes the expression of a format.

    A *text* is a form that one terminal can be: a constant, a regex, any text, and sequences and
    choices of them. llguidance's lexer takes as much as a terminal can be, so what follows such a
    text is a part of its terminal.
    """

    def __init__(
        self,
        special: Mapping[str, int],
        regex_to_lark: Callable[[str], str],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(special, options)
        self._regex_to_lark = regex_to_lark

    def expression(self, form: Any) -> str:
        """The Lark expression of a format; rules that it needs are added to ``rules``."""
        form = form_of(form)
        match form.get("type"):
            case "const_string":
                return self.literal(text_of(form, "value"))
            case "json_schema":
                return self._json_of(form)
            case "regex" | "any_text":
                return self._terminal(self._text_of(form) or "")
            case "arguments":
                return self._arguments(form)
            case "sequence":
                return self._sequence(self._elements(form), "")
            case "or":
                return self.rule(either(map(self.expression, objects_of(form, "elements"))))
            case "tag":
                return self._tag(form)
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
            case kind:
                raise RequestError(f"{NAME} has the type {str(kind)[:40]!r}; {_KINDS} are known")

    def _json_of(self, form: Mapping[str, Any]) -> str:
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping):
            raise RequestError(f"{NAME} has a json_schema that is not an object")
        found = check_schema(schema, "structural_tag")
        is_lenient = form.get("strict") is False
        closed = form.get("closed") is True
        schema = prepared(schema, found, closed=closed, lenient=is_lenient)
        if form.get("strict") is True and (keywords := not_followed(schema)):
            raise unusable_schema(form, f"the schema's keyword {keywords[0]} is not supported")
        return self.json(schema, lenient=is_lenient, spaced=form.get("spaced") is True)

    # texts

    def _text_of(self, form: Any) -> str | None:
        """The expression of a format that is a text; None for any other."""
        form = form_of(form)
        match form.get("type"):
            case "const_string" if not self.has_special(value := text_of(form, "value")):
                return literal(value)
            case "regex":
                return f"/{self._regex_to_lark(text_of(form, 'pattern'))}/"
            case "any_text":
                return self._text_without(texts_of(form, "excludes"))
            case "sequence" | "or":
                parts = [self._text_of(one) for one in objects_of(form, "elements")]
                if None in parts:
                    return None
                texts = [str(one) for one in parts]
                return _joined(texts) if form["type"] == "sequence" else either(texts)
            case _:
                return None

    def _terminal(self, expression: str) -> str:
        """A text as a terminal of its own."""
        return expression if expression.startswith(('"', "/")) else self.terminal(expression)

    def _text_without(self, texts: Sequence[str]) -> str:
        """Any text that contains none of these."""
        others = [one for one in texts if not self.is_special(one)]
        return f"({ANY_TEXT} & ~{containing(others)})" if others else ANY_TEXT

    def _goes_on(self, expression: str) -> bool:
        """True if every further character on a line may be a part of the text."""
        try:
            return is_empty(rf"({expression} /[^\n]/) & ~({expression})")
        except ValueError:
            return False  # llguidance says what is wrong with it

    def _until(self, text: str, end: str) -> str:
        """A text, and the first ``end`` after it."""
        if self.begins_special(end):  # a special token is in no text
            return f"{self._terminal(text)} {self.literal(end)}"
        ending = literal(end)
        return self.rule(rf"({text} {ending}) & ~({ANY_TEXT} {ending} /(.|\n)+/)", "[lazy]")

    def text_until(self, end: str, text: str = ANY_TEXT) -> str:
        """A text of an expression, and the first ``end`` after it."""
        if text == ANY_TEXT and not self.begins_special(end):
            return self.rule(f"{text} {literal(end)}", "[lazy]")
        return self._until(text, end)

    def _argument_text(self, form: Mapping[str, Any], end: str) -> str:
        """The text of one argument, and the ``end`` of it."""
        schema, excluded = form["json_schema"], texts_of(form, "excludes")
        schema = prepared(schema, check_schema(schema, "structural_tag"))
        try:
            text = text_expression(schema, schema, strict=form["strict"])
            if not text:
                return self.text_until(end)
            text = f"({text} & ~{containing(excluded)})"
            if is_empty(text):
                raise ValueError("its texts contain the marks of arguments")
        except ValueError as error:
            raise unusable_schema(form, str(error)) from None
        return self.text_until(end, text)

    # sequences

    def _elements(self, form: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The elements of a sequence, those of inner ones too; constants without special tokens."""
        for one in objects_of(form, "elements"):
            if one.get("type") == "sequence":
                yield from self._elements(one)
            elif one.get("type") == "const_string":
                parts = self.parts_of(text_of(one, "value"))
                yield from ({"type": "const_string", "value": part} for part in parts)
            else:
                yield one

    def _sequence(self, elements: Iterable[Mapping[str, Any]], end: str) -> str:
        """Elements one after the other, and the first ``end`` after them."""
        parts: list[str] = []
        waiting = list(elements)
        while waiting:
            run = self._run(waiting)
            if not run:
                parts.append(self._part(waiting, end))
                continue
            texts = [text for _, text in run]
            last = run[-1][0]
            if end and not waiting:
                parts.append(self._until(_joined(texts), end))
            elif not waiting or self._ends(run, waiting[0]):
                parts.append(self._terminal(_joined(texts)))
            elif last.get("type") == "const_string":
                parts.append(self._until(_joined(texts[:-1]), last["value"]))
            elif [last.get("type")] == ["any_text"] * len(run):
                parts.append(self._before_tags(last, waiting.pop(0), "" if waiting else end))
            else:
                raise endless_text(last)
        return self.rule(" ".join(parts)) if len(parts) > 1 else parts[0]

    def _part(self, waiting: list[Mapping[str, Any]], end: str) -> str:
        """Take an element that is no text, and the constant after it if only that ends it."""
        one = waiting.pop(0)
        if not waiting or self._begins_special(waiting[0]) or not self._is_open(one):
            return self._ended(one, "" if waiting else end)
        if waiting[0].get("type") != "const_string" or one.get("type") == "tags_with_separator":
            raise endless_text(one)
        value = text_of(waiting.pop(0), "value")
        ended = self._ended(one, value)
        return f"{ended} {self.literal(end)}" if end and not waiting else ended

    def _is_open(self, form: Mapping[str, Any]) -> bool:
        """True if every further character on a line may be a part of what has this format."""
        match form.get("type"):
            case "any_text" | "triggered_tags":
                return True
            case "regex":
                return self._goes_on(self._text_of(form) or "")
            case "sequence":
                return self._is_open(objects_of(form, "elements")[-1])
            case "or":
                return any(map(self._is_open, objects_of(form, "elements")))
            case "tag":
                return not form.get("end") and self._is_open(form_of(form.get("content")))
            case "tags_with_separator":
                return any(map(self._is_open, objects_of(form, "tags")))
            case _:
                return False

    def _begins_special(self, form: Mapping[str, Any]) -> bool:
        begin = form.get("value") if form.get("type") == "const_string" else form.get("begin")
        return isinstance(begin, str) and self.begins_special(begin)

    def _run(self, waiting: list[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
        """Take texts from the beginning of a sequence: a constant, or all up to something else."""
        run: list[tuple[Mapping[str, Any], str]] = []
        while waiting and (text := self._text_of(waiting[0])) is not None:
            run.append((waiting.pop(0), text))
            if run[0][0].get("type") == "const_string":
                break
        return run

    def _ends(self, run: list[tuple[Mapping[str, Any], str]], after: Mapping[str, Any]) -> bool:
        """True if texts leave what is ``after`` them to be written."""
        if self._begins_special(after):
            return True
        if run[-1][0].get("type") == "const_string" and len(run) > 1:
            run = run[:-1]
        return run[0][0].get("type") == "const_string" or not self._goes_on(
            _joined([text for _, text in run])
        )

    def _before_tags(self, text: Mapping[str, Any], after: Mapping[str, Any], end: str) -> str:
        """Any text, and the tag that ends it."""
        tags = [after]
        if after.get("type") == "or":
            tags = list(objects_of(after, "elements"))
        if any(one.get("type") != "tag" for one in tags):
            raise endless_text(text)
        form = {
            "triggers": [text_of(one, "begin") for one in tags],
            "excludes": text.get("excludes"),
            "tags": tags,
            "at_least_one": True,
            "stop_after_first": True,
        }
        found = self._triggered(form)
        return f"{found} {self.literal(end)}" if end else found

    def _ended(self, form: Mapping[str, Any], end: str) -> str:
        """A format, and the first ``end`` after it."""
        kind = form.get("type")
        if not end:
            return self.expression(form)
        if kind == "argument_text":
            return self._argument_text(form, end)
        if kind == "any_text" and not form.get("excludes"):
            return self.text_until(end)
        if kind == "sequence":
            return self._sequence(self._elements(form), end)
        if kind == "or":
            elements = objects_of(form, "elements")
            return self.rule(either(self._ended(one, end) for one in elements))
        if kind == "triggered_tags":
            return self._triggered(form, end)
        if kind == "tag" and self._is_open(form):
            return self._tag({**form, "end": end})
        text = self._text_of(form) if kind != "const_string" else None
        if text is not None:
            return self._until(text, end)
        return f"{self.expression(form)} {self.literal(end)}"

    # tags

    def _arguments(self, form: Mapping[str, Any]) -> str:
        """The arguments of a call; see ``arguments``."""
        quotes = form.get("quotes")
        how = Form(form["key_end"], form["separator"], tuple(quotes) if quotes else None)
        strict = form["strict"]
        schema = form["json_schema"]
        found = check_schema(schema, "structural_tag")
        schema = prepared(schema, found, closed=True, lenient=not strict)
        try:
            return ArgumentsWriter(self, how, schema, strict=strict).arguments()
        except ValueError as error:
            raise unusable_schema(form, str(error)) from None

    def _tag(self, form: Mapping[str, Any], begin: str | None = None) -> str:
        """A tag; ``begin`` is the rest of its beginning after a trigger."""
        begin = text_of(form, "begin") if begin is None else begin
        inner = self._ended(form_of(form.get("content")), text_of(form, "end", empty=True))
        return self.rule(f"{self.literal(begin)} {inner}")

    def _triggered(self, form: Mapping[str, Any], end: str = "") -> str:
        """Free text in which a trigger begins one of the tags, and the first ``end`` after it."""
        triggers = triggers_of(form)
        excluded = [*texts_of(form, "excludes"), *([end] if end else [])]
        free = self._text_without([*triggers, *excluded])
        tags: dict[str, list[str]] = {}
        for tag in objects_of(form, "tags"):
            begin = text_of(tag, "begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise RequestError(f"{NAME} has the tag {begin[:80]!r}, which no trigger begins")
            tags.setdefault(trigger, []).append(self._tag(tag, begin.removeprefix(trigger)))
        choices: list[str] = []
        for trigger, several in tags.items():
            if self.is_special(trigger):
                head = f"{self._terminal(free)} {self.literal(trigger)}"
            else:  # the text up to the first trigger
                others = [one for one in (*triggers, *excluded) if one != trigger]
                others = [one for one in others if not self.is_special(one)]
                text = f"({ANY_TEXT} {literal(trigger)})"
                head = self.rule(f"{text} & ~{containing(others)}" if others else text, "[lazy]")
            choices.append(self.rule(f"{head} {either(several)}"))
        tagged = self.rule(" | ".join(choices))
        at_least_one, only_one = form.get("at_least_one"), form.get("stop_after_first")
        rest = self._until(free, end) if end else self._terminal(free)
        if only_one:
            tagged = f"{tagged} {self.literal(end)}" if end else tagged
            return self.rule(tagged if at_least_one else f"{tagged} | {rest}")
        return self.rule(f"({tagged}){'+' if at_least_one else '*'} {rest}")

    def _separated(self, form: Mapping[str, Any]) -> str:
        """Tags with a separator between them."""
        tags = self.rule(
            " | ".join(self.expression({"type": "tag", **one}) for one in objects_of(form, "tags"))
        )
        if form.get("stop_after_first"):
            several = tags
        else:
            several = f"{tags} ({self.literal(text_of(form, 'separator', empty=True))} {tags})*"
        return self.rule(several if form.get("at_least_one") else f"({several})?")


def _joined(texts: Sequence[str]) -> str:
    return f"({' '.join(texts)})" if len(texts) > 1 else texts[0]
