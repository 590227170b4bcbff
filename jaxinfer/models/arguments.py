"""Checks the arguments of functions for research, with a sentence for each wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxinfer.core.errors import ArgumentError
from jaxinfer.models.params import by_path
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.decoder_config import DecoderSpec

_TAKES = "forward takes the token ids of one sequence, int32[T]"
_VMAP = "for a batch: jax.vmap(lambda t: forward(model, params, t))(tokens)"


def checked_token_ids(token_ids: Any, config: DecoderSpec) -> jax.Array:  # int32[T]
    """The token ids of one sequence, a list or an array; raises ``ArgumentError``."""
    ids = _integers(token_ids)
    if ids.ndim != 1:
        raise ArgumentError(f"{_TAKES}, and got {_described(ids)}; {_VMAP}")
    return _checked(ids, config)


def checked_batch(
    tokens: Any, lengths: Any, config: DecoderSpec
) -> tuple[jax.Array, jax.Array | None]:  # int32[T] and None, or int32[B, T] and int32[B]
    """Token ids of one sequence, or of a batch with the length of each.

    ``tokens`` is a list or an array; a list of lists of different lengths is padded. ``lengths``
    are by default those of the lists, or all of a batch's columns. Raises ``ArgumentError``.
    """
    if _is_ragged(tokens):
        if lengths is not None:
            raise ArgumentError(
                "lists of token ids have lengths of their own; leave lengths out, or pad the lists"
            )
        lengths = [len(row) for row in tokens]
        tokens = [[*row, *[0] * (max(lengths) - len(row))] for row in tokens]
    ids = _integers(tokens)
    if ids.ndim not in (1, 2):
        raise ArgumentError(
            f"forward takes token ids int32[T], or a batch int32[B, T] with lengths int32[B], and "
            f"got {_described(ids)}; use jax.vmap for further dimensions"
        )
    ids = _checked(ids, config)
    if ids.ndim == 1:
        if lengths is not None:
            raise ArgumentError(
                "lengths belong to a batch int32[B, T], and the tokens are one sequence; leave "
                "lengths out"
            )
        return ids, None
    count, longest = ids.shape
    sizes = _integers([longest] * count if lengths is None else lengths, "lengths")
    if sizes.shape != (count,) or not _within(sizes, 1, longest):
        raise ArgumentError(
            f"lengths of {count} sequences of up to {longest} tokens must be int32[{count}] from 1 "
            f"to {longest}, and are {_described(sizes)}; give one for each sequence"
        )
    return ids, sizes


def checked_params(
    params: Any, arrays: Mapping[str, ArraySpec], *, dtypes: bool = True
) -> dict[str, Any]:
    """The leaves of a params tree by path, in the order of ``arrays`` (``Model.arrays``).

    Raises ``ArgumentError``, naming the parameter, for a missing or unknown one, another shape or,
    with ``dtypes``, another dtype.
    """
    if not isinstance(params, Mapping):
        raise ArgumentError(
            f"params must be a nested dict of arrays as jaxinfer.load gives it, and are a "
            f"{type(params).__name__}"
        )
    leaves = by_path(params)
    if missing := [path for path in arrays if path not in leaves]:
        raise ArgumentError(
            f"params have no {missing[0]}{_more(missing)}; give the whole tree of parameters"
        )
    if unknown := [path for path in leaves if path not in arrays]:
        raise ArgumentError(
            f"params hold {unknown[0]}{_more(unknown)}, which the model does not have; leave it out"
        )
    for path, spec in arrays.items():
        leaf = leaves[path]
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise ArgumentError(
                f"parameter {path} is a {type(leaf).__name__}; give a JAX or numpy array"
            )
        if tuple(shape) != spec.shape:
            raise ArgumentError(
                f"parameter {path} has shape {tuple(shape)} instead of {spec.shape}; give weights "
                "of the same model"
            )
        if dtypes and jnp.dtype(dtype) != spec.dtype:
            raise ArgumentError(
                f"parameter {path} is {jnp.dtype(dtype)} instead of {jnp.dtype(spec.dtype)}; "
                "cast it with astype"
            )
    return {path: leaves[path] for path in arrays}


def _more(paths: list[str]) -> str:
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""


def _is_ragged(tokens: Any) -> bool:
    """True for a list of lists of different lengths."""
    if not isinstance(tokens, list | tuple) or not tokens:
        return False
    if not all(isinstance(row, list | tuple) for row in tokens):
        return False
    return len({len(row) for row in tokens}) > 1


def _integers(given: Any, name: str = "token ids") -> jax.Array:
    if isinstance(given, str):
        raise ArgumentError(
            "forward takes token ids, and got a text; make ids of it with tokenizer.encode(text)"
        )
    try:
        array = given if isinstance(given, jax.Array) else np.asarray(given)
    except ValueError as error:  # rows of different lengths
        raise ArgumentError(f"{name} are no array: {error}") from None
    if array.size == 0:
        raise ArgumentError(f"forward takes at least one token, and got {name} of no element")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ArgumentError(
            f"{name} must be integers, and are {_described(array)}; cast them to int32"
        )
    if not isinstance(array, jax.Array) and not _within(array, -(2**31), 2**31 - 1):
        raise ArgumentError(f"{name} are beyond int32")
    return jnp.asarray(array, jnp.int32)


def _checked(ids: jax.Array, config: DecoderSpec) -> jax.Array:
    positions, length = config.num_positions, ids.shape[-1]
    if positions is not None and length > positions:
        raise ArgumentError(
            f"the model has {positions} positions, and the sequence has {length} tokens; shorten it"
        )
    if not _within(ids, 0, config.vocab_size - 1):
        raise ArgumentError(
            f"token ids must be from 0 to {config.vocab_size - 1}, the model's vocabulary; encode "
            "the text with the model's own tokenizer"
        )
    return ids


def _within(array: Any, least: int, most: int) -> bool:
    """True if all values are in the range, or not known yet, as in a function that is traced."""
    if isinstance(array, Tracer):
        return True
    values = np.asarray(array)
    return bool(values.min() >= least and values.max() <= most)


def _described(array: Any) -> str:
    """For example int32[2, 5]."""
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
