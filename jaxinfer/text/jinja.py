"""Jinja as chat templates use it: transformers' extensions and functions, in a sandbox.

A template comes with a model or with a request and is a program. It runs within a budget of steps
(iterations of loops, and calls) and of sizes. That ends loops, not every single operation of C that
takes long: a server renders in a process that can be killed (``text.render_process``).

Imported for a first template: it takes 0.1 s, which a start of an engine's own process has not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sized
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from jaxinfer.core.errors import TokenizerError

MAX_STEPS = 1_000_000  # of one rendering: 0.5 to 1 s; a chat of 1,000 messages takes some 10,000
STEPS_OF_CALL = 16  # a call of a macro takes 12 us, an iteration 0.5 us
MAX_REPEATED = 1 << 24  # items of a list, or characters of a text, that is multiplied by a number
MAX_BITS = 1 << 16  # of a power of integers
_VARIABLE = re.compile(r"'(\w+)' is undefined")  # Jinja's words
_FIELD = re.compile(r"'[\w ]+' has no (?:attribute|element) '?(\w+)'?")
# Names that no template can spell: a variable and a filter.
_STEPS, _COUNT = "steps left", "count a step"


class Program:
    """A compiled template."""

    def __init__(self, source: str, clock: Callable[[], datetime]) -> None:
        """Raises ``TokenizerError`` if the source is no template, or nested too deeply."""
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters |= {"tojson": _tojson, _COUNT: _count}
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        # Python's own compiler may refuse what Jinja accepts, such as 21 loops in each other
        except Exception as error:
            raise TokenizerError(f"The chat template is not valid Jinja: {reason(error)}") from None

    def run(self, variables: dict[str, Any], max_characters: int) -> str | None:
        """The text for these variables, None if it has too many characters; raises whatever the
        template raises.
        """
        pieces: list[str] = []
        left = max_characters
        for piece in self._template.generate({**variables, _STEPS: _Steps()}):
            left -= len(piece)
            if left < 0:
                return None
            pieces.append(piece)
        return "".join(pieces)


def reason(error: BaseException) -> str:
    """The error in words; some have none of their own."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError):
        return "it calls itself without an end"
    words = str(error) or type(error).__name__
    if isinstance(error, jinja2.UndefinedError):
        if found := _VARIABLE.fullmatch(words):
            unset = f"it reads the variable {found[1]}, which is not set"
            return f"{unset}; pass it in chat_template_kwargs"
        if found := _FIELD.fullmatch(words):
            return f"it reads the field {found[1]}, which is absent"
    return words


def is_deliberate(error: BaseException | None) -> bool:
    """True if the template has raised this error itself, or exceeds a budget."""
    return type(error) is jinja2.TemplateError or isinstance(error, MemoryError)


class _Steps:
    """The steps that a rendering has left."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Counts calls and iterations of loops, and refuses huge products and powers.

    Intercepted operators are not evaluated while a template is compiled.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context.parent[_STEPS].take(STEPS_OF_CALL)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(other, int):
                    _check_size(len(one) * other, MAX_REPEATED)
        elif isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right, MAX_BITS)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            step = nodes.Filter(nodes.Const(None), _COUNT, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step).set_lineno(loop.lineno))
        return super()._generate(source, *arguments, **options)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise jinja2.TemplateError(f"a product or power has a size of {size}; {most} is allowed")


@pass_context
def _count(context: Context, _: None) -> None:
    context.parent[_STEPS].take(1)


class _Generation(Extension):
    """Accepts ``{% generation %}...{% endgeneration %}``, which marks text for training masks."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # variables set in the block end with it


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which the prompt must not contain.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
