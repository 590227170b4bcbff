"""The fields of structural tags, checked; errors begin with the name of the form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD

NAME = f"{FIELD}.structural_tag"


def triggers_of(form: Mapping[str, Any]) -> list[str]:
    """The triggers, without those that begin like a shorter one."""
    triggers = texts_of(form, "triggers")
    if not triggers:
        raise RequestError(f"{NAME} needs triggers, a list of texts")
    found = [
        one
        for one in dict.fromkeys(triggers)
        if not any(one.startswith(other) for other in triggers if other != one)
    ]
    for one in found:
        if inner := next((other for other in found if other != one and other in one), None):
            raise RequestError(f"{NAME} has the trigger {inner[:40]!r} within {one[:40]!r}")
    return found


def endless_text(text: Mapping[str, Any]) -> RequestError:
    """The error for a text that would go on instead of what comes after it."""
    return RequestError(
        f"{NAME} has a text that nothing ends: {text.get('type')} is possible at the end, or "
        "before a const_string, regex or tag"
    )


def unusable_schema(form: Mapping[str, Any], reason: str) -> RequestError:
    """The error for a schema, with the names of the function and the argument that it is of."""
    names = [f"the {one} {form[one][:60]!r}" for one in ("argument", "function") if one in form]
    where = f" for {' of '.join(names)}" if names else ""
    return RequestError(f"{NAME} cannot be used{where}: {reason}")


def form_of(form: Any) -> Mapping[str, Any]:
    """A format, which is an object."""
    if not isinstance(form, Mapping):
        raise RequestError(f"{NAME} needs a format, which is an object with a type")
    return cast("Mapping[str, Any]", form)


def text_of(form: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    """A field that is text."""
    value = form.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise RequestError(f"{NAME} needs {name}, a text, in each {form.get('type', 'structure')}")
    return value


def texts_of(form: Mapping[str, Any], name: str) -> list[str]:
    """A field that is a list of texts, or left out."""
    value = form.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise RequestError(f"{NAME} needs {name}, a list of texts that are not empty")
    return cast("list[str]", value)


def objects_of(form: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A field that is a list of objects, not empty."""
    value = form.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, Mapping) for v in value):
        raise RequestError(f"{NAME} needs {name}, a list of objects that is not empty")
    return value
