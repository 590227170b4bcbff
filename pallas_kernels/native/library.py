"""The shared library that ``setup.py`` builds of ``src``: finding, registering, conversion."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lib.quantised import PACKED, nibble_block
from pallas_kernels.lib.shares import in_shares
from pallas_kernels.native.sources import version

# The names of the calls in executables, and those of the library's handlers.
GEMM, ATTENTION = "jaxinfer_quantised_gemm", "jaxinfer_attention"
FIXED_GEMM = "jaxinfer_fixed_gemm"
ROPE_APPEND, RESIDUAL_NORM = "jaxinfer_rope_append", "jaxinfer_residual_norm"
EXPERTS, SAMPLE, MASK = "jaxinfer_experts", "jaxinfer_sample", "jaxinfer_mask"
DELTA_DECODE, SSD_DECODE = "jaxinfer_delta_decode", "jaxinfer_ssd_decode"
_HANDLERS = MappingProxyType(
    {
        GEMM: "JaxinferQuantisedGemm",
        FIXED_GEMM: "JaxinferFixedGemm",
        ATTENTION: "JaxinferAttention",
        ROPE_APPEND: "JaxinferRopeAppend",
        RESIDUAL_NORM: "JaxinferResidualNorm",
        EXPERTS: "JaxinferExperts",
        SAMPLE: "JaxinferSample",
        MASK: "JaxinferMask",
        DELTA_DECODE: "JaxinferDeltaDecode",
        SSD_DECODE: "JaxinferSsdDecode",
    }
)
_FUNCTIONS = (  # that are called by ``ctypes``
    "jaxinfer_version",
    "jaxinfer_variants",
    "jaxinfer_choose",
    "jaxinfer_from_blocks",
    "jaxinfer_pack_nibbles",
    "jaxinfer_pack_bytes",
    "jaxinfer_pack_tiles",
)
ALIGNMENT = 64  # bytes
MISSING = "the native library is not built (reinstall with a C++ compiler or the package ziglang)"
_ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")  # place, entry size and number of section headers


class BrokenLibrary(RuntimeError):
    """The file of the native library cannot be used; the message says what to do."""


@cache
def library() -> ctypes.CDLL | None:
    """The library; None if it was not built. ``missing`` says the same in words.

    Raises ``BrokenLibrary`` for a file that is not whole, or was built of other sources than this
    package has.
    """
    files = sorted(Path(__file__).parent.glob("_library*.so"))
    return _opened(files[0]) if files else None


def _opened(file: Path) -> ctypes.CDLL:
    try:
        _check_whole(file)
        loaded = ctypes.CDLL(str(file))
        _check_version(loaded)
        for name in (*_HANDLERS.values(), *_FUNCTIONS):
            getattr(loaded, name)
    except (OSError, AttributeError) as error:  # AttributeError: a function is not there
        reason = str(error).removeprefix(f"{file}: ")
        raise BrokenLibrary(
            f"the native library {file} cannot be used ({reason}); build it again with `python "
            "setup.py build_ext --inplace` in a clone, or else install jaxinfer again"
        ) from error
    loaded.jaxinfer_variants.restype = ctypes.c_char_p
    return loaded


def _check_version(loaded: ctypes.CDLL) -> None:
    """Raise ``OSError`` if the library was built of other sources than this package has.

    A handler of other sources may take other arguments, or read them in another order.
    """
    if not hasattr(loaded, "jaxinfer_version"):
        raise OSError("it was built of other sources: it has no version")
    loaded.jaxinfer_version.restype = ctypes.c_char_p
    built, here = loaded.jaxinfer_version().decode(), version()
    if built != here:
        raise OSError(f"it was built of other sources: its version is {built}, that of src {here}")


def _check_whole(file: Path) -> None:
    """Raise ``OSError`` for an ELF file that was cut off.

    The dynamic linker does not notice: SIGBUS ends the process at the first use of a page that is
    not in the file. The section headers are the file's last part.
    """
    with file.open("rb") as opened:
        header = opened.read(_ELF_HEADER.size)
    if not header.startswith(_ELF) or len(header) < _ELF_HEADER.size:
        return  # of another platform, or refused by the dynamic linker
    start, size, count = _ELF_HEADER.unpack(header)
    if file.stat().st_size < start + size * count:
        raise OSError("it is cut off")


def missing() -> str | None:
    """Why no native kernel can run: the library was not built. None if it is there."""
    return MISSING if library() is None else None


def variants() -> tuple[str, ...]:
    """The instruction sets of the kernels that this processor has, the fastest and used one first.

    Empty if the library was not built.
    """
    found = library()
    return () if found is None else tuple(found.jaxinfer_variants().decode().split())


@cache
def register() -> bool:
    """Make the kernels known to XLA, which executables need before they are loaded.

    False if the library was not built.
    """
    found = library()
    if found is None:
        return False
    for target, handler in _HANDLERS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(found, handler)), "cpu")
    return True


def call(target: str, results: Any, *arrays: jax.Array | None, **attributes: Any) -> Any:
    """Call a handler in a trace; a missing array is passed as an empty one.

    ``results`` are abstract arrays, ``attributes`` those of the handler, and perhaps
    ``input_output_aliases``.
    """
    register()
    aliases = attributes.pop("input_output_aliases", None)
    function = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    given = (jnp.zeros(0, jnp.float32) if array is None else array for array in arrays)
    return function(*given, **attributes)


def from_blocks(
    ggml_type: int,
    raw: np.ndarray,  # uint8[O, bytes of a row]
    num_blocks: int,
    made: Mapping[str, np.ndarray],  # of ``Quantised.tree``, contiguous
) -> bool:
    """Convert whole rows of a GGUF type, by its number in GGML, into the arrays of a matrix.

    False if the library was not built, or does not know the type; then nothing was written.
    """
    found = library()
    if found is None:
        return False
    kind = next(iter(made))
    parts = (made.get(name) for name in (kind, "scales", "offsets", "supers"))
    pairs = kind in PACKED and nibble_block(2 * made[kind].shape[1]) == 64
    return bool(
        found.jaxinfer_from_blocks(
            ctypes.c_int(ggml_type),
            _address(raw),
            ctypes.c_int64(num_blocks),
            ctypes.c_bool(pairs),
            *map(_address, parts),
        )
    )


def pack_lanes(kind: str, values: np.ndarray) -> np.ndarray | None:
    """Values by rows in the order of ``arrangements.LANES``; None if the library was not built."""
    found = library()
    if found is None:
        return None
    rows = np.ascontiguousarray(values)
    tiles = _aligned(rows.shape)
    outputs, inputs = len(rows), rows.shape[1] * (2 if kind in PACKED else 1)
    arguments = [_address(rows), _address(tiles), ctypes.c_int64(outputs), ctypes.c_int64(inputs)]
    if kind in PACKED:
        found.jaxinfer_pack_nibbles(*arguments, ctypes.c_int64(nibble_block(inputs)))
    else:
        found.jaxinfer_pack_bytes(*arguments)
    return tiles


def pack_tiles(
    kind: str,
    values: np.ndarray,
    order: np.ndarray,  # int32[4096]
) -> np.ndarray | None:
    """Values by rows in the order of ``arrangements.TILES``; None if the library was not built.

    ``order`` has the place in a tile, counted row by row, of each value in memory.
    """
    found = library()
    if found is None:
        return None
    rows, packed = np.ascontiguousarray(values), kind in PACKED
    tiles = np.empty(rows.shape, np.uint8)
    inputs = rows.shape[1] * (2 if packed else 1)

    def pack(share: slice) -> None:
        found.jaxinfer_pack_tiles(
            _address(rows[share]),
            _address(tiles[share]),
            ctypes.c_int64(share.stop - share.start),
            ctypes.c_int64(inputs),
            ctypes.c_bool(packed),
            _address(order),
        )

    in_shares(len(rows), 64, rows.nbytes, pack)
    return tiles


def _address(array: np.ndarray | None) -> ctypes.c_void_p:
    """The address of an array's data, which must live until the call has ended; or null."""
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:  # uint8
    """An array, not initialised, that JAX uses as it is on a CPU. It copies others, whose memory
    does not begin at a multiple of 64 bytes: a second copy of each weight while it is loaded.
    """
    size = math.prod(shape)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].reshape(shape)
