"""Grammars in llguidance's form from ``StructuredOutputsParams``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD, StructuredOutputsParams
from jaxinfer.text.grammar.gbnf import grammar_as_lark
from jaxinfer.text.grammar.library import load_llguidance
from jaxinfer.text.grammar.prepared import prepared
from jaxinfer.text.grammar.schema import check_depth, check_schema
from jaxinfer.text.grammar.tags import tags_as_lark

# Spaces, tabs and newlines between the parts of JSON: enough for indented text, but bounded, since
# a model that prefers spaces to the next value would otherwise continue to max_tokens.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# States of a matcher's lexer, of 0.5 to 1 KB each, seldom 3 KB. A regex of many lines needs 20 for
# each token, a schema with bounded strings 6. llguidance's own limit of 250,000 would be 150 MB.
MAX_LEXER_STATES = 32_768
_UNSUPPORTED = "Unimplemented keys: ["  # llguidance's words, before a list of names
_ONE_OF = "oneOf constraints are not supported"
MAX_MESSAGE = 300  # characters of llguidance's explanation that an error repeats


def limits() -> Any:
    """llguidance's limits of a matcher (``llguidance.LLParserLimits``), in trials and engines."""
    return load_llguidance().LLParserLimits(max_lexer_states=MAX_LEXER_STATES)


def grammar_source(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """The grammar as llguidance reads it, which has not been compiled.

    ``special``: the ids of special tokens by their text. Raises ``RequestError`` that begins with
    the field: for text that is not in its form, for a schema that never ends or is nested too
    deeply, and for GBNF or tags that have no grammar.
    """
    try:
        return _source(load_llguidance(), params, special)
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # llguidance raises ValueError, its reader of GBNF any other
        raise unusable(params.kind, str(error)) from None


def _source(
    library: ModuleType, params: StructuredOutputsParams, special: Mapping[str, int]
) -> str:
    matcher = library.LLMatcher
    if params.json is not None or params.json_object:
        text = '{"type": "object"}' if params.json is None else params.json
        return matcher.grammar_from_json_schema(_schema_text(text, params), overrides=_json(params))
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # one terminal: a rule may have 2,000 choices, and compiles ten times as long
        texts = (json.dumps(text, ensure_ascii=False) for text in params.choice)
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
    if params.grammar is not None:
        of_gbnf = import_module("llguidance.gbnf_to_lark").gbnf_to_lark
        return matcher.grammar_from_lark(grammar_as_lark(params.grammar, of_gbnf))
    assert params.structural_tag is not None
    tag = _parsed("structural_tag", params.structural_tag)
    check_depth("structural_tag", tag)
    lark = tags_as_lark(tag, special, library.regex_to_lark, _json(params))
    return matcher.grammar_from_lark(lark)


def _json(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options of schemas. A schema cannot switch on an approximation by itself."""
    pattern = params.whitespace_pattern or WHITESPACE
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    # else a model that writes \u00e9 for é is led to \u000e9, another character and a 9
    options["json_allow_general_unicode_escapes"] = True
    if params.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": pattern}


def _schema_text(text: str, params: StructuredOutputsParams) -> str:
    schema = _parsed("json", text)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RequestError(f"{FIELD}.json must be a JSON schema, which is an object")
    schema = prepared(schema, check_schema(schema), closed=params.disable_additional_properties)
    return json.dumps(schema, ensure_ascii=False)


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text, parse_float=_number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{FIELD}.{name} is not valid JSON: {error}") from None


def _number(text: str) -> int | float:
    """2.0 as 2: JSON has one type of number, and llguidance counts in whole ones."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def unusable(kind: str, reason: str) -> RequestError:
    """The error for a grammar that llguidance refuses for this reason."""
    reason = reason.replace(_UNSUPPORTED, "its keywords are not supported: ").replace('"]', '"')
    if _ONE_OF in reason:
        reason = (
            "its keyword oneOf is only possible where the choices exclude each other by their "
            "types, or by constants of a property that all of them have; use anyOf"
        )
    words = " ".join(reason.partition("\n<state>")[0].split())
    return RequestError(f"{FIELD}.{kind} cannot be used: {words[:MAX_MESSAGE]}")
