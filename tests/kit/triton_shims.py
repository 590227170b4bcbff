"""Stand-ins for ``jax_triton.triton_call`` on a machine without a GPU.

``interpreted`` runs a kernel in Triton's interpreter on numpy memory, outside of which accesses are
errors; it needs a process started with TRITON_INTERPRET=1. ``Recorder`` runs nothing and records
each call; ``compile_call`` compiles one to sm_90 machine code and reads its resources.
"""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton
import triton.language as tl
from triton._utils import validate_block_shape
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, TensorHandle, interpreter_builder

from kit.triton_memory import LaunchMemory
from pallas_kernels.lib.page_scales_triton import UNPACK_PAIRS

HOPPER = GPUTarget("cuda", 90, 32)
LAUNCH_OPTIONS = ("num_warps", "num_stages")
# Each sum and product of 32-bit integers would be computed in 64 bits too, which took a third of
# the time; the memory check finds a wrong index.
WITHOUT_OVERFLOW_CHECKS = replace(interpreter_builder.options, sanitize_overflow=False)
TRITON_NAMES = {
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "uint8": "u8",
}
NUMPY_TYPES = {theirs: jnp.dtype(name) for name, theirs in TRITON_NAMES.items()}


@contextmanager
def in_place_of_triton_call(stand_in: Any) -> Iterator[None]:
    """Within the context, the kernels' wrappers call ``stand_in``.

    Jitted functions trace them only once, so a trace from outside must not be used inside, and vice
    versa.
    """
    jax.clear_caches()
    try:
        with patch.object(jax_triton, "triton_call", stand_in):
            yield
    finally:
        jax.clear_caches()


class _Buffer:
    """An array with the interface of the interpreter's pointers."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = TRITON_NAMES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _NumpyGrid(GridExecutor):
    """The interpreter's loop over CTAs, on buffers that need no copies from a device."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, *args: Any) -> None:
        pass


# The interpreter keeps a bfloat16 or an 8-bit float as an integer of its bits. Its conversions lose
# the carry of a mantissa that is rounded up, and its matmul takes bfloat16's bits for integers;
# these two functions replace them, with numpy's extension types.


def _float_values(bits: np.ndarray, dtype: Any) -> np.ndarray:
    return bits.view(NUMPY_TYPES[str(dtype.scalar)])


def _convert_float(bits: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    del rounding_mode  # to nearest, ties to even, as the hardware does
    converted = _float_values(bits, source).astype(NUMPY_TYPES[str(target.scalar)])
    return converted.view(f"uint{target.scalar.primitive_bitwidth}")


def _dot(a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any) -> TensorHandle:
    left, right = (_float_values(x.data, x.dtype).astype(d.data.dtype) for x in (a, b))
    return TensorHandle(left @ right + d.data, d.dtype.scalar)


def _inline_asm(
    asm: str, constraints: str, values: list[TensorHandle], types: list[Any], *_: Any
) -> _Results:
    """The kernels' only instructions in PTX, for which the interpreter has none of its own."""
    if asm != UNPACK_PAIRS.value:
        raise NotImplementedError(f"no interpretation of {asm}")
    (entries,) = values
    bits = np.ascontiguousarray(entries.data)[..., None].view(np.uint8)
    floats = bits.view(jnp.dtype("float8_e4m3fn")).astype(np.float16)
    return _Results([TensorHandle(floats[..., byte], tl.float16) for byte in (0, 1)])


class _Results(list[TensorHandle]):
    """The results of an operation, with the interface of one."""

    def get_result(self, index: int) -> TensorHandle:
        return self[index]


_numpy_type_of_scalar = cache(interpreter._get_np_dtype)


def _numpy_type(dtype: Any) -> np.dtype:
    """The dtype of a type's elements; the interpreter's own function is slow."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_type_of_scalar(scalar)


# The interpreter makes the shape of every value anew, of objects: 60 % of its time. Shapes are few,
# and nothing changes one, so these stand in: they make each once.


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[core.tuple, int]:
    return core.tuple(sizes), validate_block_shape(list(sizes))


@cache
def _tensor_shape(sizes: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _make_block_type(self: core.block_type, element_ty: Any, shape: Any) -> None:
    sizes = tuple(x.value if isinstance(x, core.constexpr) else x for x in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel = _block_shape(sizes)
    self.name = f"<{sizes}, {element_ty}>"


def _make_tensor(self: core.tensor, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shape((*type.shape,) if type.is_block() else ())


_broadcast_unlike = TritonSemantic.broadcast_impl_value


def _broadcast(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast_unlike(self, lhs, rhs)


def _is_ref(argument: Any) -> bool:
    return isinstance(argument, jax.Ref)


def interpreted(
    *args: Any, kernel: Any, out_type: Any, grid: tuple[int, ...], **params: Any
) -> Any:
    """``triton_call`` by interpretation. Outputs hold NaN until the kernel writes them."""
    refs = [i for i, arg in enumerate(args) if _is_ref(arg)]
    outs, tree = jax.tree.flatten(out_type)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs]
    results += [jax.ShapeDtypeStruct(args[i].shape, args[i].dtype) for i in refs]
    constants = {name: x for name, x in params.items() if name in kernel.arg_names}

    def run(*values: Any) -> list[np.ndarray]:
        outputs = [np.full(x.shape, np.nan).astype(x.dtype) for x in outs]
        handed = [*map(np.asarray, values), *outputs]
        names = [name for name in kernel.arg_names if name not in constants]
        memory = LaunchMemory(kernel.__name__, dict(zip(names, handed, strict=True)))
        grid3 = (*grid, 1, 1)[:3]
        executor = _NumpyGrid(kernel.rewrite(), kernel.arg_names, grid3)
        with (
            # a function patches the language at every call; once a launch is enough
            patch.object(interpreter, "_patch_lang", cache(interpreter._patch_lang)),
            patch.object(interpreter, "_get_np_dtype", _numpy_type),
            patch.object(interpreter_builder, "create_dot", _dot),
            patch.object(interpreter_builder, "create_inline_asm", _inline_asm),
            patch.object(interpreter, "_convert_float", _convert_float),
            patch.object(interpreter_builder, "options", WITHOUT_OVERFLOW_CHECKS),
            patch.object(core.block_type, "__init__", _make_block_type),
            patch.object(core.tensor, "__init__", _make_tensor),
            patch.object(TritonSemantic, "broadcast_impl_value", _broadcast),
            memory.enforced(),
        ):
            executor(*map(_Buffer, memory.arrays), **constants)
        return [*memory.arrays[len(values) :], *(memory.arrays[i] for i in refs)]

    values = [arg[...] if i in refs else arg for i, arg in enumerate(args)]
    written = jax.pure_callback(run, results, *values)
    for i, value in zip(refs, written[len(outs) :], strict=True):
        args[i][...] = value
    return jax.tree.unflatten(tree, written[: len(outs)])


@dataclass(frozen=True)
class KernelCall:
    """The parameters that determine a kernel's machine code."""

    kernel: Any
    # of each parameter that is not a constant, in Triton's notation
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        sizes = ",".join(f"{k}={v}" for k, v in (*self.constants, *self.options))
        types = ",".join(dict.fromkeys(kind.removeprefix("*") for _, kind in self.types))
        return f"{self.kernel.__name__}({types};{sizes})"


class Recorder:
    """A ``triton_call`` that records its calls, each kind once, and returns zeros."""

    def __init__(self) -> None:
        self.calls: dict[KernelCall, None] = {}

    def __call__(
        self, *args: Any, kernel: Any, out_type: Any, grid: tuple[int, ...], **params: Any
    ) -> Any:
        arrays = (*args, *jax.tree.leaves(out_type))
        parameters = {p.name: p.is_constexpr for p in kernel.params}
        given = {name: x for name, x in params.items() if name not in LAUNCH_OPTIONS}
        pointers = [name for name in parameters if name not in given]
        assert len(pointers) == len(arrays), (
            f"{kernel.__name__}: {pointers} and no more are missing"
        )
        assert not given.keys() - parameters, f"{kernel.__name__}: {given.keys() - parameters}"
        types = {
            name: f"*{TRITON_NAMES[str(x.dtype)]}" for name, x in zip(pointers, arrays, strict=True)
        }
        # an integer, unless it is 1: jax-triton treats 1 as a constant
        integers = [name for name, x in given.items() if not parameters[name] and x != 1]
        constants = {name: x for name, x in given.items() if name not in integers}
        assert math.prod(grid) > 0, f"{kernel.__name__}: grid {grid}"
        assert all(size < 1 << 16 for size in grid[1:]), f"{kernel.__name__}: grid {grid}"
        options = {name: params[name] for name in LAUNCH_OPTIONS}
        call = KernelCall(
            kernel,
            tuple((types | dict.fromkeys(integers, "i32")).items()),
            tuple(sorted(constants.items())),
            tuple(options.items()),
        )
        self.calls[call] = None
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)


@dataclass(frozen=True)
class MachineCode:
    """The resources that a compiled kernel takes of the SM, per thread and per CTA."""

    registers: int
    spilled_bytes: int  # stores and loads of spilled registers
    shared_bytes: int
    matmuls: frozenset[str]  # M and K of the tensor cores' instructions: "m64k16"


def compile_call(call: KernelCall) -> MachineCode:
    """Compile for sm_90 as jax-triton would.

    All arrays are aligned to 16 bytes, and nothing is known of integers.
    """
    constants = dict(call.constants)
    types = dict(call.types) | dict.fromkeys(constants, "constexpr")
    order = [parameter.name for parameter in call.kernel.params]
    source = ASTSource(
        call.kernel,
        {name: types[name] for name in order},
        {(order.index(name),): value for name, value in constants.items()},
        {
            (order.index(name),): [["tt.divisibility", 16]]
            for name, kind in call.types
            if kind.startswith("*")
        },
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        redirect_stdout(io.StringIO()) as report,
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=HOPPER, options=dict(call.options))
    assert compiled.asm["cubin"]
    found = re.findall(r"\bw?g?mma\S*\.(m\d+)n\d+(k\d+)", compiled.asm["ptx"])
    shapes = frozenset("".join(shape) for shape in found)
    return MachineCode(*_registers_and_spills(report.getvalue()), compiled.metadata.shared, shapes)


def _registers_and_spills(report: str) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, from the assembler's report."""
    spills = re.findall(r"(\d+) bytes spill", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spills and registers, report
    return int(registers[1]), sum(map(int, spills))
