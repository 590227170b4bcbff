"""The tests' cache of compiled modules returns the executable that would be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.loop.late_compiles import LateCompiles

X = jnp.arange(4.0)


def compiled(function: Callable[..., Any], **options: Any) -> jax.stages.Compiled:
    return jax.jit(function, **options).lower(X, X).compile()


def shared(x: jax.Array, y: jax.Array) -> jax.Array:
    del y
    return jnp.sin(x) * 1.25


def test_the_same_module_is_compiled_once_and_counted_each_time() -> None:
    alarm = LateCompiles()
    with alarm:
        first, again = (compiled(lambda x, y: shared(x, y)) for _ in range(2))
    assert again is first and alarm.count == 2


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda x, y: jnp.sin(x) * 1.5, {}),
        (lambda x, y: shared(y, x), {}),
        (lambda x, y: (shared(x, y),), {}),
        (lambda x, y: shared(x, y), {"donate_argnums": 0}),
        (
            lambda x, y: shared(x, y),
            {"compiler_options": {"xla_backend_optimization_level": 0}},
        ),
    ],
    ids=["constant", "argument", "tree", "donated", "options"],
)
def test_other_modules_are_compiled(function: Callable[..., Any], options: dict[str, Any]) -> None:
    first = compiled(lambda x, y: shared(x, y))
    assert compiled(function, **options) is not first


def test_callbacks_of_equal_modules_are_distinguished() -> None:
    """The text of their modules is the same."""

    def added(number: float) -> jax.stages.Compiled:
        return compiled(lambda x, y: jax.pure_callback(lambda x: x + jnp.float32(number), X, x))

    assert [float(added(number)(X, X)[0]) for number in (1.0, 2.0)] == [1.0, 2.0]
