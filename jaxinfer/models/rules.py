"""The ways a parameter is put together from checkpoint tensors; they move data, nothing else.

Owns: the ``build`` functions of ``TensorRule``.
"""

from __future__ import annotations

import numpy as np


def as_is(tensor: np.ndarray) -> np.ndarray:
    """The tensor itself."""
    return tensor


def join_outputs(*weights: np.ndarray) -> np.ndarray:  # [out_i, in] each -> [in, sum of out_i]
    """Linear weights side by side, turned from [out, in] to [in, out]."""
    return np.concatenate([weight.T for weight in weights], axis=1)


def join(*tensors: np.ndarray) -> np.ndarray:  # [out_i] each -> [sum of out_i]
    """Biases one after another."""
    return np.concatenate(tensors)


def one_more(weight: np.ndarray) -> np.ndarray:  # [D] -> float32[D]
    """A norm's weight that is stored less one."""
    return 1.0 + weight.astype(np.float32)


def stack_one_more(*weights: np.ndarray) -> np.ndarray:  # [D] each -> float32[number of them, D]
    """Norms on top of each other, whose weights are stored less one."""
    return np.stack([one_more(weight) for weight in weights])


def stack(*tensors: np.ndarray) -> np.ndarray:  # [D] each -> [number of tensors, D]
    """Norms on top of each other."""
    return np.stack(tensors)
