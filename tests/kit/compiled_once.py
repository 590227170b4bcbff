"""``compiled_once``: each module is compiled once for all tests of a process."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import pytest

from jaxinfer.engine.loop.late_compiles import COMPILE_EVENT

# Linux gives a process 65,530 (vm.max_map_count). An executable has a dozen, and XLA's compiler
# crashes where there are no more, which 550 tests of families reached.
MANY_MAPS = 56_000


@contextmanager
def compiled_once() -> Iterator[Callable[[], None]]:
    """Within the context, no module is compiled again with the same options.

    XLA would produce the same executable. A compilation is reported in each case, so that alarms
    notice it. The function that it gives forgets all executables if the process has many maps.
    """
    compile_original = jax.stages.Lowered.compile
    made: dict[Any, jax.stages.Compiled] = {}

    def compiled(
        self: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None, **others: Any
    ) -> jax.stages.Compiled:
        lowering: Any = self._lowering
        compile_args = lowering.compile_args
        # the text of a module that calls a Python function, or holds an array, does not identify it
        unidentified = [compile_args[name] for name in ("host_callbacks", "keepalive", "mut")]
        if others or any(unidentified) or lowering.const_args:
            return compile_original(self, compiler_options, **others)
        options = (*lowering._compiler_options_kvs, *sorted((compiler_options or {}).items()))
        arguments = (self.in_tree, self.args_info, sorted(compile_args["kept_var_idx"]))
        identity = f"{self.as_text()}{arguments}{self.out_tree}{options}"
        digest = hashlib.sha256(identity.encode()).digest()
        if digest in made:
            jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.0)
        else:
            made[digest] = compile_original(self, compiler_options)
        return made[digest]

    def forget_if_many() -> None:
        if len(Path("/proc/self/maps").read_bytes().splitlines()) > MANY_MAPS:
            made.clear()
            jax.clear_caches()
            gc.collect()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compiled)
        yield forget_if_many
