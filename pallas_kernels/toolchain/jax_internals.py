"""The toolchain's uses of JAX, jaxlib and jax-triton beyond their documented API.

StableHLO and Mosaic modules as MLIR objects, the custom calls of kernels in them, and the names
under which kernels are found.
"""

from __future__ import annotations

import hashlib
import importlib
import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from jax.extend.mlir import deserialize_portable_artifact, serialize_portable_artifact
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import dtype_to_ir_type, ir, make_ir_context

__all__ = ["dtype_to_ir_type", "ir", "make_ir_context", "stablehlo"]  # passed on

TRITON_PRIMITIVE = "triton_kernel_call"  # jax-triton's primitive in a jaxpr
TRITON_CALL = "triton_kernel_call_ffi"  # the custom call of a kernel in Triton
OPAQUE = "opaque"  # its attribute: a compressed TritonAnyKernelCall (jaxlib/gpu/triton.proto)

MOSAIC = "jax.experimental.pallas.mosaic_gpu"  # the language; importing it loads Mosaic's runtime
MOSAIC_CALL = "mosaic_gpu_v2"  # the custom call of a kernel in Mosaic
MODULE, HASH = "module", "kernel_hash"  # its attributes: the kernel, and the key of Mosaic's cache
WAIT = "griddepcontrol.wait"  # ``pdl.grid_dependency_wait`` in a Mosaic module
USES_PDL = "mosaic_gpu.uses_pdl"  # attribute of a module whose kernel may start early

ALIASES = "output_operand_aliases"
LAYOUTS = ("operand_layouts", "result_layouts")
CONFIG = "mhlo.backend_config"  # the attributes of a custom call

# Settings on which traces depend.
TRACE_SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion")
LOWERING_SETTINGS = (
    # Modules run with this version of JAX and need not suit an older one. (Mosaic's older form has
    # names that the newer reader does not know.)
    ("jax_export_ignore_forward_compatibility", True),
    # Otherwise a kernel's bytes, and so its hash, depend on the call site.
    ("jax_include_full_tracebacks_in_locations", False),
)


def read_module(artifact: bytes) -> ir.Module:
    """A StableHLO module as ``jax.export`` serializes it, in the current context."""
    return deserialize_portable_artifact(artifact)


def write_module(module: ir.Module) -> bytes:
    """A StableHLO module, serialized as ``jax.export`` does."""
    return serialize_portable_artifact(module, stablehlo.get_current_version())


def custom_calls(operation: Any, target: str) -> Iterator[Any]:  # of an ir.Operation
    """Every call of ``target`` within an operation."""
    for inner in within(operation):
        named = inner.attributes
        if "call_target_name" in named and named["call_target_name"].value == target:
            yield inner


def within(operation: Any) -> Iterator[Any]:  # of an ir.Operation
    """All operations in its regions, nested ones included."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from within(inner.operation)


def attribute_of(call: Any, name: str) -> bytes:
    """One attribute of a call, text or bytes."""
    (content,) = (each.attr.value_bytes for each in call.attributes[CONFIG] if each.name == name)
    return content


def set_attribute(call: Any, name: str, content: str | bytes) -> None:
    """Replace one attribute of a call. Within the module's context."""
    config = {each.name: each.attr for each in call.attributes[CONFIG]}
    config[name] = ir.StringAttr.get(content)
    call.attributes[CONFIG] = ir.DictAttr.get(config)


def set_kernel(call: Any, module: bytes) -> None:
    """Give a Mosaic call another kernel. Within the module's context."""
    set_attribute(call, MODULE, module)
    set_attribute(call, HASH, hashlib.sha256(module).digest())


def aliases_of(call: Any) -> dict[int, int]:
    """Results of a call that alias an operand: operand index by result index."""
    found = {}
    for each in call.attributes.get(ALIASES, ()):
        alias = stablehlo.OutputOperandAlias(each)
        found[next(iter(alias.output_tuple_indices), 0)] = alias.operand_index
    return found


@contextmanager
def mosaic_context() -> Generator[None]:
    """An MLIR context that knows Mosaic's dialect."""
    with make_ir_context() as context, ir.Location.unknown():
        _mosaic().dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        yield


def mosaic_serde(module: ir.Module, *, serialize: bool) -> None:
    """Convert a Mosaic module to its stable form, or back; in place."""
    switch = "true" if serialize else "false"
    passes = f"builtin.module(mosaic_gpu-serde{{serialize={switch}}})"
    _mosaic().passmanager.PassManager.parse(passes).run(module.operation)


def mosaic_bytecode(module: ir.Module) -> bytes:
    """A Mosaic module as its custom call holds it."""
    out = io.BytesIO()
    module.operation.write_bytecode(out, desired_version=0)
    return out.getvalue()


def _mosaic() -> Any:
    """Where JAX makes modules for Mosaic: 0.2 s to import, which a start from a bundle saves."""
    return importlib.import_module("jax.experimental.mosaic.gpu.core")
