"""A quantised safetensors checkpoint as logical tensors: one ``X.weight`` for each layer X."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from jaxinfer.weights.quantised.layouts import LAYOUTS
from jaxinfer.weights.quantised.scheme import Scheme
from jaxinfer.weights.quantised.stored import CHECK_CONFIG, Parts, StoredMatrix
from jaxinfer.weights.quantised.values import dequantised
from pallas_kernels.lib.quantised import Form, Quantised

WEIGHT = ".weight"
# The tensor of a matrix's values, by layout. A plain one has no dtype of floats.
_VALUES = (
    (".qweight", ("awq", "gptq")),
    (".weight_packed", ("packed",)),
    ("_blocks", ("mxfp4",)),
    (WEIGHT, ("plain", "pairs")),
)
# Other tensors of a quantised matrix, each of which must belong to one.
_OTHERS = (
    *(".qzeros", ".scales", ".g_idx", "_scales", ".weight_scale", ".weight_scale_inv"),
    *(".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale"),
)
# Scales of activations and of the KV cache, which are not quantised here.
_UNUSED = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".output_scale"),
    *(".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *(".prob_output_scale", ".k_zero_point", ".v_zero_point"),
)


class QuantisedCheckpoint:
    """A ``Checkpoint`` whose quantised matrices can be read as they are stored.

    Each tensor of the wrapped checkpoint belongs to one matrix, or is presented as it is.
    ``unneeded`` names biases of zeros, which AutoGPTQ writes next to each matrix; a model without
    that bias ignores them.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        """Match tensors with the scheme.

        Besides headers only small tensors are read: the order of inputs, stored shapes, and biases
        of GPTQ. Raises ``CheckpointError`` that names the tensor if one is missing, misshapen, or
        belongs to no matrix.
        """
        self._checkpoint = checkpoint
        self._matrices: dict[str, StoredMatrix] = {}
        self._tensors: dict[str, TensorInfo] = {}
        biases: list[str] = []
        owners: dict[str, str] = {}
        for name, info in checkpoint.tensors.items():
            module, layouts = _split(name, info)
            if module is not None:
                matrix = _stored(module, name, layouts, checkpoint, scheme)
                is_stack = len(matrix.shape) > 2
                logical = module if is_stack or module.endswith(WEIGHT) else module + WEIGHT
                self._matrices[logical] = matrix
                owners |= dict.fromkeys(matrix.names, logical)
                biases.append(f"{module}.bias")
        for name, info in checkpoint.tensors.items():
            if name in owners:
                self._tensors.setdefault(owners[name], self._info(owners[name]))
            elif name.endswith(_OTHERS):
                raise CheckpointError(
                    f"tensor {name} belongs to no quantised weight; {CHECK_CONFIG}"
                )
            elif not name.endswith(_UNUSED):
                if name in self._matrices:
                    raise CheckpointError(
                        f"the checkpoint holds tensor {name} both quantised and not; {CHECK_CONFIG}"
                    )
                self._tensors[name] = info
        self.unneeded = frozenset(self._zeros(biases)) if _has_biases(scheme) else frozenset[str]()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See ``Checkpoint``; a quantised matrix has its logical shape, [outputs, inputs].

        A stack has the shape of one of floats, [experts, inputs, outputs].
        """
        return self._tensors

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the quantised matrices, by logical name."""
        return {name: matrix.form for name, matrix in self._matrices.items()}

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``; a quantised matrix is dequantised to float32."""
        if name in self._matrices:
            matrix = dequantised(self.read_quantised(name, part))
            return matrix if part is None else matrix.T
        return self._checkpoint.read(name, part)

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """A quantised matrix in its form: numpy arrays of exactly the stored values.

        Raises ``CheckpointError`` when its bytes are missing, or zero points differ from those of
        symmetric weights although the config says that they are symmetric.
        """
        return self._matrices[name].load(lambda tensor: self._checkpoint.read(tensor, part))

    def _info(self, logical: str) -> TensorInfo:
        """The logical tensor's header, with the size of all its parts."""
        matrix = self._matrices[logical]
        parts = [self._checkpoint.tensors[name] for name in matrix.names]
        nbytes = sum(part.nbytes for part in parts)
        return replace(
            parts[0], shape=matrix.shape, dtype=str(matrix.form), nbytes=nbytes, readable=True
        )

    def _zeros(self, names: Iterable[str]) -> Iterable[str]:
        """Those of the tensors that exist and hold zeros only."""
        found = (name for name in names if name in self._tensors and self._tensors[name].readable)
        return (name for name in found if not self._checkpoint.read(name).any())


def _split(name: str, info: TensorInfo) -> tuple[str | None, tuple[str, ...]]:
    """The module and the possible layouts of a tensor of quantised values; None for others."""
    for role, layouts in _VALUES:
        if name.endswith(role) and not (role == WEIGHT and info.readable):
            return name.removesuffix(role), layouts
    return None, ()


def _stored(
    module: str, name: str, layouts: tuple[str, ...], checkpoint: Checkpoint, scheme: Scheme
) -> StoredMatrix:
    """The matrix of a module, checked."""
    weights = scheme.weights_of(module)
    if weights is None:
        raise CheckpointError(
            f"tensor {name} is quantised, but quantization_config says that {module} is not; "
            f"{CHECK_CONFIG}"
        )
    if weights.layout not in layouts:
        raise CheckpointError(
            f"tensor {name} is stored as {checkpoint.tensors[name].dtype}, which does not fit the "
            f"format that quantization_config gives {module}; {CHECK_CONFIG}"
        )
    matrix = LAYOUTS[weights.layout](Parts(module, checkpoint.tensors), weights)
    if matrix.check is not None:
        matrix.check(checkpoint.read)
    return matrix


def _has_biases(scheme: Scheme) -> bool:
    return any(rule.weights is not None and rule.weights.bias_of_zeros for rule in scheme.rules)
