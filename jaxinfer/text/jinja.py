"""Jinja as chat templates use it: transformers' extensions and functions, in a sandbox.

Imported for a first template: it takes 0.1 s, which a start of an engine's own process has not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.core.errors import TokenizerError


def compiled_template(source: str, clock: Callable[[], datetime]) -> jinja2.Template:
    """Compile a template, which comes with a model and is untrusted; raises ``TokenizerError``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"The chat template is not valid Jinja: {error}") from error


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
