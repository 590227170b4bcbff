"""Modules that are compiled once for all tests of a process.

Owns: ``compiled_once``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.monitoring
import pytest

from jaxinfer.engine.loop.late_compiles import COMPILE_EVENT


@contextmanager
def compiled_once() -> Iterator[None]:
    """While it lasts, no module is compiled again with the same options: XLA makes the same of it.

    It is told as a compilation all the same, so that alarms hear of it.
    """
    compile_anew = jax.stages.Lowered.compile
    made: dict[Any, jax.stages.Compiled] = {}

    def compiled(
        self: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None, **others: Any
    ) -> jax.stages.Compiled:
        lowering: Any = self._lowering
        beside = lowering.compile_args
        # what calls a function of Python's, or holds an array, does not say in its text which
        untold = [beside[name] for name in ("host_callbacks", "keepalive", "mut")]
        if others or any(untold) or lowering.const_args:
            return compile_anew(self, compiler_options, **others)
        options = (*lowering._compiler_options_kvs, *sorted((compiler_options or {}).items()))
        arguments = (self.in_tree, self.args_info, sorted(beside["kept_var_idx"]))
        wanted = f"{self.as_text()}{arguments}{self.out_tree}{options}"
        digest = hashlib.sha256(wanted.encode()).digest()
        if digest in made:
            jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.0)
        else:
            made[digest] = compile_anew(self, compiler_options)
        return made[digest]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compiled)
        yield
