"""The layouts of published formats; each function reads the headers of one matrix's tensors.

    awq       qweight int32[K, O / 8], scales [G, O], qzeros int32[G, O / 8]
    gptq      qweight int32[K / n, O], scales [G, O], qzeros int32[G, O / n], g_idx int32[K]
    packed    weight_packed int32[O, K / n], weight_scale [O, G], weight_zero_point int32[O / n, G],
              weight_shape int[2], weight_g_idx int32[K]
    plain     weight [O, K] in int8 or e4m3, weight_scale, weight_scale_inv or scale,
              weight_zero_point
    mxfp4     blocks uint8[O, K / 32, 16], scales uint8[O, K / 32]; of a stack [E, ...] each
    pairs     weight int8[O, K / 2], scale [O, K / 32]; values are those of mxfp4 (DeepSeek-V4)

n is 8 for int4 and 4 for int8. References: AutoAWQ 0.2.9 (awq/utils/packing_utils.py), GPTQModel
7.7 (utils/model.py), compressed-tensors 0.20 (compressors), transformers 5.23
(integrations/finegrained_fp8.py, mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import ml_dtypes
import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.quantised.packing import (
    AWQ_ORDER,
    from_awq,
    from_pairs,
    signed,
    unpack_words,
    words_to_bytes,
)
from jaxinfer.weights.quantised.scheme import WeightScheme
from jaxinfer.weights.quantised.stored import (
    CHECK_CONFIG,
    DTYPES,
    Parts,
    Read,
    StoredMatrix,
    check_order,
    check_zeros,
    form_of,
    int8_with_zeros,
)
from pallas_kernels.lib.quantised import Quantised

_FLOATS = ("F16", "BF16", "F32")
_SCALE_ROLES = (".weight_scale_inv", ".scale")  # besides .weight_scale
_SCALES = (*_FLOATS, "F8_E8M0")
_PER_WORD = MappingProxyType({"int4": 8, "int8": 4})
_PLAIN = MappingProxyType({"int8": "I8", "fp8": "F8_E4M3"})
_EXPONENT_BITS = 7  # bits below bfloat16's exponent, which has e8m0's bias of 127


def awq(parts: Parts, scheme: WeightScheme) -> StoredMatrix:
    """AutoAWQ's GEMM arrangement: (value - zero) * scale."""
    inputs, words = parts.matrix(".qweight", ("I32",))
    outputs = 8 * words
    groups = scheme.num_groups(parts.name(".qweight"), inputs)
    scales = parts.take(".scales", _FLOATS, (groups, outputs))
    zeros = not scheme.symmetric or parts.has(".qzeros")
    if zeros:
        parts.take(".qzeros", ("I32",), (groups, words))
    form = form_of("int4", inputs, groups, DTYPES[scales.dtype], zeros=zeros)

    def load(read: Read) -> Quantised:
        values = from_awq(read(parts.name(".qweight")))
        scales = np.ascontiguousarray(read(parts.name(".scales")).T)
        if not zeros:
            return Quantised("int4", values, scales)
        stored = unpack_words(read(parts.name(".qzeros")), "int4").reshape(groups, words, 8)
        points = np.empty_like(stored)
        points[..., AWQ_ORDER] = stored
        return Quantised("int4", values, scales, _transposed(points.reshape(groups, outputs)))

    return parts.stored(".qweight", form, (outputs, inputs), load)


def gptq(parts: Parts, scheme: WeightScheme) -> StoredMatrix:
    """AutoGPTQ's and GPTQModel's arrangement: (value - zero) * scale."""
    per_word, middle = _PER_WORD[scheme.kind], {"int4": 8, "int8": 128}[scheme.kind]
    rows, outputs = parts.matrix(".qweight", ("I32",))
    inputs = rows * per_word
    groups = scheme.num_groups(parts.name(".qweight"), inputs)
    scales = parts.take(".scales", _FLOATS, (groups, outputs))
    parts.take(".qzeros", ("I32",), (groups, -(-outputs // per_word)))
    check = None
    if parts.has(".g_idx"):
        parts.take(".g_idx", ("I32", "I64"), (inputs,))
        check = partial(check_order, parts.name(".g_idx"), inputs, scheme.group)
    form = form_of(scheme.kind, inputs, groups, DTYPES[scales.dtype], zeros=not scheme.symmetric)

    def load(read: Read) -> Quantised:
        octets = words_to_bytes(read(parts.name(".qweight")).T)
        scales = np.ascontiguousarray(read(parts.name(".scales")).T)
        stored = read(parts.name(".qzeros")).view(np.uint32)
        # GPTQModel adds 1 to each value of a word with carries, the inverse of how it writes this
        # format; without them a zero point of 0 would change the next one.
        if scheme.one_less:
            stored = stored + np.uint32(0x11111111 if scheme.kind == "int4" else 0x01010101)
        zeros = unpack_words(stored, scheme.kind)[:, :outputs]
        if scheme.symmetric:
            check_zeros(parts.name(".qzeros"), zeros, middle)
        return _with_zeros(
            scheme.kind, octets, scales, None if scheme.symmetric else _transposed(zeros)
        )

    return parts.stored(".qweight", form, (outputs, inputs), load, check)


def packed(parts: Parts, scheme: WeightScheme) -> StoredMatrix:
    """compressed-tensors' pack-quantized: values and zero points are stored plus 8 or 128."""
    per_word = _PER_WORD[scheme.kind]
    outputs, words = parts.matrix(".weight_packed", ("I32",))
    inputs = words * per_word
    groups = scheme.num_groups(parts.name(".weight_packed"), inputs)
    scales = _take_scales(parts, ".weight_scale", outputs, groups, scheme)
    if not scheme.symmetric:
        parts.take(".weight_zero_point", ("I32",), (-(-outputs // per_word), groups))
    check = _packed_check(parts, (outputs, inputs), scheme.group)
    form = form_of(scheme.kind, inputs, groups, scales, zeros=not scheme.symmetric)

    def load(read: Read) -> Quantised:
        octets = words_to_bytes(read(parts.name(".weight_packed")))
        scales = _expanded(read(parts.name(".weight_scale")), outputs, groups, 1)
        if scheme.symmetric:
            return _with_zeros(scheme.kind, octets, scales, None)
        stored = read(parts.name(".weight_zero_point"))
        zeros = _transposed(unpack_words(stored.T, scheme.kind)[:, :outputs])
        return _with_zeros(scheme.kind, octets, scales, zeros)

    return parts.stored(".weight_packed", form, (outputs, inputs), load, check)


def _packed_check(
    parts: Parts, shape: tuple[int, int], group: int | None
) -> Callable[[Read], None]:
    """The check of the matrix's own shape, and of the order of inputs."""
    ordered, shaped = parts.has(".weight_g_idx"), parts.has(".weight_shape")
    if ordered:
        parts.take(".weight_g_idx", ("I32", "I64"), (shape[1],))
    if shaped:
        parts.take(".weight_shape", ("I32", "I64"), (2,))

    def check(read: Read) -> None:
        if ordered:
            check_order(parts.name(".weight_g_idx"), shape[1], group, read)
        stored = tuple(read(parts.name(".weight_shape")).tolist()) if shaped else shape
        if stored != shape:
            raise CheckpointError(
                f"tensor {parts.name('.weight_packed')} holds a matrix of shape {shape} instead of "
                f"{stored}; rows that do not fill their last word are not supported, so use "
                "another checkpoint of this model"
            )

    return check


def plain(parts: Parts, scheme: WeightScheme) -> StoredMatrix:
    """Weights in int8 or e4m3 with a scale for the matrix, each output, group or block."""
    outputs, inputs = parts.matrix(".weight", (_PLAIN[scheme.kind],))
    block_outputs = scheme.block_outputs
    groups = scheme.num_groups(parts.name(".weight"), inputs)
    role = next((one for one in _SCALE_ROLES if parts.has(one)), ".weight_scale")
    scales = _take_scales(parts, role, outputs, groups, scheme)
    zero_role = ".weight_zero_point"
    if not scheme.symmetric or parts.has(zero_role):
        kinds = ("I8", "F8_E4M3", *_FLOATS) if scheme.symmetric else ("I8",)
        parts.take(zero_role, kinds, *_scale_shapes(outputs, groups, scheme))
    kept, zeros = scheme.kept_block(outputs, groups), not scheme.symmetric
    form = form_of(scheme.kind, inputs, groups, scales, zeros=zeros, block_outputs=kept)

    def load(read: Read) -> Quantised:
        values, found = read(parts.name(".weight")), read(parts.name(role))
        scales = _expanded(found, outputs // kept, groups, block_outputs // kept)
        if parts.has(zero_role):
            zeros = read(parts.name(zero_role))
            if not scheme.symmetric:
                zeros = _expanded(zeros, outputs, groups, block_outputs)
                return int8_with_zeros(values, scales, zeros)
            check_zeros(parts.name(zero_role), zeros.astype(np.float32), 0)
        return Quantised(scheme.kind, values, scales.astype(form.scale_dtype, copy=False))

    return parts.stored(".weight", form, (outputs, inputs), load)


def mxfp4(parts: Parts, scheme: WeightScheme) -> StoredMatrix:
    """Blocks of 32 e2m1 values with a power of 2, of a matrix or of a stack of them."""
    del scheme
    info = parts.take("_blocks", ("U8",))
    if len(info.shape) not in (3, 4) or info.shape[-1] != 16 or not all(info.shape):
        raise CheckpointError(
            f"tensor {parts.name('_blocks')} has shape {info.shape} instead of (outputs, "
            "inputs / 32, 16), or of that for each expert; " + CHECK_CONFIG
        )
    *stack, outputs, groups, _ = info.shape
    parts.take("_scales", ("U8", "F8_E8M0"), info.shape[:-1])
    inputs = 32 * groups
    form = form_of("fp4", inputs, groups, "bfloat16", zeros=False)

    def load(read: Read) -> Quantised:
        pairs = read(parts.name("_blocks")).reshape(outputs, -1)
        return Quantised("fp4", from_pairs(pairs), powers_of_2(read(parts.name("_scales"))))

    shape = (*stack, inputs, outputs) if stack else (outputs, inputs)
    return parts.stored("_blocks", form, shape, load)


def pairs(parts: Parts, scheme: WeightScheme) -> StoredMatrix:
    """Two e2m1 values a byte, the first in its low bits, with a power of 2 for 32 of them."""
    outputs, width = parts.matrix(".weight", ("I8",))
    inputs = 2 * width
    groups = scheme.num_groups(parts.name(".weight"), inputs)
    parts.take(".scale", ("U8", "F8_E8M0"), (outputs, groups))
    form = form_of("fp4", inputs, groups, "bfloat16", zeros=False)

    def load(read: Read) -> Quantised:
        values = from_pairs(read(parts.name(".weight")).view(np.uint8))
        return Quantised("fp4", values, powers_of_2(read(parts.name(".scale"))))

    return parts.stored(".weight", form, (outputs, inputs), load)


def powers_of_2(exponents: np.ndarray) -> np.ndarray:  # uint8, e8m0 -> bfloat16
    """2 to the exponent minus 127, exactly; 255 stands for NaN (OCP MX formats 1.0)."""
    bits = exponents.view(np.uint8).astype(np.uint16) << _EXPONENT_BITS
    bits[exponents.view(np.uint8) == 0] = 1 << (_EXPONENT_BITS - 1)  # 2 ** -127 is subnormal
    bits[exponents.view(np.uint8) == 255] |= 1 << (_EXPONENT_BITS - 1)
    return bits.view(ml_dtypes.bfloat16)


def _with_zeros(
    kind: str,
    octets: np.ndarray,  # uint8[O, K / 2] in pair order, or uint8[O, K]
    scales: np.ndarray,  # [O, G]
    zeros: np.ndarray | None,  # uint8[O, G]; None: symmetric
) -> Quantised:
    """A matrix of unsigned values."""
    if kind == "int4":
        return Quantised(kind, from_pairs(octets), scales, zeros)
    if zeros is None:
        return Quantised(kind, signed(octets), scales)
    return int8_with_zeros(signed(octets), scales, signed(zeros))


def _scale_shapes(outputs: int, groups: int, scheme: WeightScheme) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of a matrix may have."""
    if scheme.group is not None:
        return ((-(-outputs // scheme.block_outputs), groups),)
    return ((), (1,), (1, 1), (outputs,), (outputs, 1))


def _take_scales(parts: Parts, role: str, outputs: int, groups: int, scheme: WeightScheme) -> str:
    """The dtype of the scales, which are checked."""
    info = parts.take(role, _SCALES, *_scale_shapes(outputs, groups, scheme))
    return DTYPES[info.dtype]


def _expanded(found: np.ndarray, outputs: int, groups: int, block_outputs: int) -> np.ndarray:
    """Scales or zero points for each output and group, of those that outputs share."""
    if found.dtype == ml_dtypes.float8_e8m0fnu:
        found = powers_of_2(found)
    if found.size == 1:
        return np.full((outputs, groups), found.reshape(()))
    rows = found.reshape(-1, groups)
    return np.repeat(rows, block_outputs, axis=0)[:outputs] if block_outputs > 1 else rows


def _transposed(zeros: np.ndarray) -> np.ndarray:  # [G, O] -> [O, G]
    return np.ascontiguousarray(zeros.T)


LAYOUTS: Mapping[str, Callable[[Parts, WeightScheme], StoredMatrix]] = MappingProxyType(
    {
        **{"awq": awq, "gptq": gptq, "packed": packed, "plain": plain, "mxfp4": mxfp4},
        "pairs": pairs,
    }
)
