"""A matrix with supers (GGUF's K forms) as one array, in which the Hopper kernels read it.

A record has 64 outputs and the inputs of one super. It consists of rows of 64 words: those of its
tiles of values (``arrange``); then factors, of which each row has a word for each output:

    scales       four of consecutive groups in a row, the first in the lowest byte
    offsets      as scales, if the form has them
    supers       float16 of the scales in the lower half, of the offsets in the higher half

So a matrix is one argument of a compiled step, of which each takes 0.45 us of the host, and a
K step has two copies instead of four. Absent bytes are 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.lib.quantised import PACKED, Form, Quantised, recorded_name

TILE = 64  # outputs and inputs
WORDS = 64  # of a row
BYTES = 4  # of a word
SCALE_DTYPES = ("int8", "uint8")


def fits(form: Form) -> bool:
    """True if matrices of this form, with supers, can be recorded."""
    group, super_group = form.group or 0, form.super_group or 0
    whole = super_group % TILE == 0 and group > 0 and super_group % group == 0
    return whole and not form.zeros and form.scale_dtype in SCALE_DTYPES


def value_rows(form: Form) -> int:
    """Rows of values in a record."""
    per_byte = 2 if form.kind in PACKED else 1
    return (form.super_group or 0) * TILE // per_byte // (BYTES * WORDS)


def small_rows(group: int, super_group: int) -> int:
    """Rows of scales in a record, and of offsets."""
    return -(-super_group // group // BYTES)


def factor_rows(form: Form) -> int:
    """Rows of factors in a record."""
    return small_rows(form.group or 1, form.super_group or 1) * (1 + form.offsets) + 1


def array_of(kind: str, form: Form, num_outputs: int, num_inputs: int) -> tuple[str, Any, str]:
    """Name, shape and dtype of the array of a recorded matrix of an arranged kind."""
    super_group = form.super_group or num_inputs
    rows = value_rows(form) + factor_rows(form)
    shape = (num_outputs // TILE, num_inputs // super_group, rows, WORDS)
    return recorded_name(kind, form), shape, "int32"


def recorded(w: Quantised) -> Quantised:
    """A matrix whose values are in tiles, and its other arrays by rows, as records; also of JAX
    arrays, in a trace.
    """
    form = _form_of(w)
    assert fits(form), f"{form} has no records"
    outer, count = w.num_outputs // TILE, w.supers.shape[1]
    values = w.values.reshape(outer, count, value_rows(form), BYTES * WORDS).view(np.int32)
    rows = [values, *(_packed(part, outer, count) for part in (w.scales, w.offsets))]
    pairs = w.supers.reshape(outer, TILE, count, -1)
    rows.append(_filled(pairs, 2).swapaxes(1, 2).view(np.int32).swapaxes(2, 3))
    module = _module(w.values)
    array = module.concatenate([one for one in rows if one is not None], axis=2)
    return Quantised(w.kind, array, recorded=form)


def values_of(w: Quantised) -> Any:
    """The values of a recorded matrix in tiles, in the shape of ``Form.arrays``."""
    assert w.recorded is not None
    values = w.values[:, :, : value_rows(w.recorded)]
    return values.reshape(w.num_outputs, -1).view(np.uint8)


def factors_of(w: Quantised) -> tuple[Any, Any, Any]:
    """Scales, offsets (or None) and supers of a recorded matrix by rows."""
    assert w.recorded is not None
    words = w.values[:, :, value_rows(w.recorded) :]  # [O / 64, S, rows, 64]
    return _unpacked(
        w.recorded, words.transpose(0, 3, 1, 2).reshape(w.num_outputs, *words.shape[1:3])
    )


def bytes_at(w: Quantised, at: jax.Array) -> jax.Array:  # int32[...] -> uint8[...]
    """Bytes of a recorded matrix by their numbers in ``values_of``."""
    assert w.recorded is not None
    flat, size = w.values.reshape(-1, *w.values.shape[2:]), BYTES * WORDS
    record, byte = jnp.divmod(at, value_rows(w.recorded) * size)
    word = flat[record, byte // size, byte % size // BYTES]
    return (word >> 8 * (byte % BYTES)).astype(jnp.uint8)


def factors_at(w: Quantised, ids: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """``factors_of`` for some outputs: int32[T]."""
    assert w.recorded is not None
    words = w.values[ids // TILE, :, value_rows(w.recorded) :, ids % TILE]  # [T, S, rows]
    return _unpacked(w.recorded, words)


def factor(words: jax.Array, byte: Any, *, signed: bool) -> jax.Array:  # float32[64]
    """A byte of words as float32, in a kernel; the number of the byte is an int32 scalar."""
    if signed:
        words = lax.shift_left(words, shift(words, 3 - byte))
        words = lax.shift_right_arithmetic(words, jnp.int32(24))
    else:
        words = lax.shift_right_logical(words, shift(words, byte)) & 0xFF
    return words.astype(jnp.float32)


def shift(words: jax.Array, byte: Any) -> jax.Array:  # int32[64]
    """The bits below a byte of words."""
    return lax.broadcast_in_dim(jnp.int32(8 * byte), words.shape, [])


def half(words: jax.Array, index: int) -> jax.Array:  # float32[64]
    """A float16 of words as float32, in a kernel."""
    words = lax.shift_right_logical(words, jnp.int32(16 * index))
    return lax.bitcast_convert_type(words.astype(jnp.int16), jnp.float16).astype(jnp.float32)


def _form_of(w: Quantised) -> Form:
    """The form of a matrix whose values are in tiles, but without the order in its kind."""
    inputs = w.num_inputs
    return Form(
        w.base,
        inputs // w.scales.shape[1],
        str(w.scales.dtype),
        zeros=w.zeros is not None,
        offsets=w.offsets is not None,
        super_group=inputs // w.supers.shape[1],
    )


def _packed(part: Any, outer: int, count: int) -> Any:
    """Bytes [O, G] as rows of words [O / 64, S, rows, 64]."""
    if part is None:
        return None
    grouped = part.reshape(outer, TILE, count, -1)
    rows = -(-grouped.shape[3] // BYTES)
    words = _filled(grouped, rows * BYTES).view(np.int32)  # [O / 64, 64, S, rows]
    return words.transpose(0, 2, 3, 1)


def _unpacked(form: Form, words: Any) -> tuple[Any, Any, Any]:  # int32[T, S, rows]
    """Scales, offsets (or None) and supers of the words of factors of outputs."""
    assert form.group is not None and form.super_group is not None
    count, rows = form.super_group // form.group, small_rows(form.group, form.super_group)

    def small(first: int) -> Any:
        found = words[:, :, first : first + rows].view(np.dtype(form.scale_dtype))
        return found[:, :, :count].reshape(len(words), -1)

    supers = words[:, :, -1:].view(np.float16)[:, :, : 1 + form.offsets]
    return small(0), small(rows) if form.offsets else None, supers


def _filled(part: Any, size: int) -> Any:
    """An array whose last axis has this size, with zeros behind its values; contiguous."""
    missing = size - part.shape[-1]
    module = _module(part)
    if missing:
        zeros = module.zeros((*part.shape[:-1], missing), part.dtype)
        return module.concatenate([part, zeros], axis=-1)
    return np.ascontiguousarray(part) if module is np else part


def _module(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else jnp
