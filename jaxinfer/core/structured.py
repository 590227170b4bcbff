"""``StructuredOutputsParams``: the form that a text must have. Names and fields are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from jaxinfer.core.errors import RequestError

MAX_GRAMMAR_BYTES = 256 * 1024  # of a schema, regex or grammar as text
MAX_REGEX_BYTES = 16 * 1024  # also of a pattern within a schema
MAX_CHOICES = 16 * 1024
MAX_SCHEMA_DEPTH = 128  # of lists and objects within each other
FIELD = "structured_outputs"

# the fields of which exactly one must be set, as errors list them
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class FormLimits(msgspec.Struct, frozen=True):
    """What one form may take: to compile it once and follow it, and then as long as it is used."""

    seconds: float = 0.75  # of CPU time, so that a busy machine refuses nothing else
    num_bytes: int = 32 << 20  # that stay; 250 KB of a schema with 600 definitions take 20 MB

    @property
    def most_bytes(self) -> int:
        """Bytes while it is compiled."""
        return 3 * self.num_bytes

    @property
    def wall_seconds(self) -> float:
        """For a form that does not get its CPU time."""
        return 20 * self.seconds


DEFAULT_FORM_LIMITS = FormLimits()


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """How a model marks its thoughts, which come before the answer. The form of the answer begins
    after them, stop strings count after them, and the mark that ends them is forced after
    ``budget`` tokens, or after the call that has begun in them.
    """

    begin: tuple[int, ...] = ()  # token ids of the mark; the answer may also have no thoughts
    end: tuple[int, ...] = ()  # empty: there are none
    is_open: bool = False  # the prompt ends within the thoughts
    budget: int | None = None  # tokens; None: no limit
    answer: tuple[int, ...] = ()  # of the mark before the answer, which has to be there
    call_begin: tuple[int, ...] = ()  # of the marks of a call; empty: they are not known
    call_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.end and (self.begin or self.is_open):
            raise RequestError("thinking.end must have at least one token id")
        if self.budget is not None and self.budget < 0:
            raise RequestError(f"thinking.budget must be at least 0, got {self.budget}")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Exactly one of ``json`` (a schema), ``regex``, ``choice`` (texts), ``grammar`` (Lark or
    GBNF), ``json_object`` (any object) and ``structural_tag`` (tags whose contents have a schema).

    Schemas and structural tags may be given as objects; they are kept as JSON text. Only the shape
    is checked here; ``text.grammar`` reads the contents. Raises ``RequestError`` that begins with
    the field.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False  # there is one implementation, so nothing to fall back to

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            self._set(name, _json_text(name, getattr(self, name)))
        self._set("choice", _choice(self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"{' and '.join(given)} are set" if given else "none is set"
            raise RequestError(f"{FIELD} needs exactly one of {', '.join(KINDS)}; {what}")
        _check_text("grammar", self.grammar)
        for name in ("regex", "whitespace_pattern"):
            _check_text(name, getattr(self, name), MAX_REGEX_BYTES)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) not in (None, True, False):
                raise RequestError(f"{FIELD}.{name} must be true or false")

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams | None:
        """From a mapping, or an object with these attributes such as vLLM's own class."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            names = cls.__struct_fields__
            given = {name: getattr(given, name) for name in names if hasattr(given, name)}
        fields = {
            str(name): value
            for name, value in cast("Mapping[Any, Any]", given).items()
            if value is not None and name not in ("backend", "_backend")
        }
        unknown = sorted(fields.keys() - set(cls.__struct_fields__))
        if unknown:
            raise RequestError(f"{FIELD}.{unknown[0]} is unknown; the kinds are {', '.join(KINDS)}")
        return cls(**fields)

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def num_characters(self) -> int:
        """The length of its texts."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, *(self.choice or ()))
        return sum(len(text) for text in texts if text)

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)


def _json_text(name: str, value: Any) -> str | None:
    """A JSON value as text, no longer than allowed; text is kept."""
    if value is None:
        return None
    if not isinstance(value, (str, Mapping, bool)):
        raise RequestError(f"{FIELD}.{name} must be an object or JSON text, got {value!r:.100}")
    if not isinstance(value, str):
        if (size := _compact_size(value)) > 2 * MAX_GRAMMAR_BYTES:
            _check_size(name, size)
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{FIELD}.{name} cannot be written as JSON: {error}") from None
    _check_text(name, value)
    return value


def _compact_size(value: Any) -> int:
    """Bytes of a value as JSON without spaces, 0 if it is not known. msgspec needs a tenth of the
    time of ``json``, which would hold up a server that gets schemas of 8 MiB.
    """
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0  # ``json`` writes it, or says what is wrong


def _choice(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{FIELD}.choice must be a list of texts, got {value!r:.100}")
    texts = tuple(cast("Iterable[Any]", value))
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{FIELD}.choice must hold at least one text, and no empty one")
    if len(texts) > MAX_CHOICES:
        raise RequestError(f"{FIELD}.choice has {len(texts)} texts; {MAX_CHOICES} are possible")
    _check_text("choice", "".join(texts))
    return texts


def _check_text(name: str, value: Any, most: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise unless ``value`` is None or text of at most ``most`` bytes that has a UTF-8 form."""
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise RequestError(f"{FIELD}.{name} must be text that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{FIELD}.{name} has no UTF-8 form; use plain text") from None
    _check_size(name, size, most)


def _check_size(name: str, size: int, most: int = MAX_GRAMMAR_BYTES) -> None:
    if size > most:
        raise RequestError(f"{FIELD}.{name} has {size} bytes; at most {most} are possible")
