"""Runs kernel cases in Triton's interpreter: ``python -m kit.triton_sweep OP/IMPL/CASE...``.

A process of its own, with TRITON_INTERPRET=1, since a process either interprets kernels or compiles
them. Prints one JSON object: for each case null, or the error of the result.
"""

import json
import sys
from importlib import import_module

import jax

from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.harness.registry import Impl, KernelOp, all_ops
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.paged_prefill import launch, xla
from pallas_kernels.paged_prefill.ref import PrefillArgs


def _on_converted(args: PrefillArgs) -> jax.Array:  # [T, N, H]
    """``paged_prefill`` on converted pages of some rows, of which XLA's definition takes the part
    of the Mosaic kernel.
    """
    module = import_module("pallas_kernels.paged_prefill.converted.triton")
    return module.launch_with(FEW_PAGES, args, xla.paged_prefill)


FEW_PAGES = 15  # of a case's first rows
ON_CONVERTED = Impl("on_converted", _on_converted, supports=launch.triton_supports)


def _impl(op: KernelOp, name: str) -> Impl:
    return next(impl for impl in (*op.impls, ON_CONVERTED) if impl.name == name)


def run(name: str) -> str | None:
    """The error of the named case, or None."""
    op_name, impl_name, case_name = name.split("/")
    op = next(op for op in all_ops() if op.name == op_name)
    impl = _impl(op, impl_name)
    case = next(case for case in op.cases if case.name == case_name)
    try:
        return mismatch(op, impl, case, op.build(case, 0))
    except Exception as error:  # one broken kernel must not hide the results of the others
        return f"{name}: {error!r}"


if __name__ == "__main__":
    with in_place_of_triton_call(interpreted):
        json.dump({name: run(name) for name in sys.argv[1:]}, sys.stdout)
