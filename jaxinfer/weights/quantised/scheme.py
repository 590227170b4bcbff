"""The record of a ``quantization_config``: how each matrix of a checkpoint is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import regex

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError

PATTERN = "re:"  # a target with this prefix is a regular expression
# Class names, torch's and vLLM's, by the last part of a module's name; others are linear layers.
_CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed_tokens": ("Embedding", "VocabParallelEmbedding"),
        "lm_head": ("Linear", "LinearBase", "ParallelLMHead"),
    }
)
_LINEAR = ("Linear", "LinearBase")
_SECONDS = 1.0


@dataclass(frozen=True)
class WeightScheme:
    """How some matrices are stored.

    ``layout`` is the arrangement of their tensors:

        awq     qweight, qzeros, scales; eight outputs in an int32
        gptq    qweight, qzeros, scales, g_idx; 32 / bits inputs in an int32
        packed  weight_packed, weight_scale, ...; 32 / bits inputs in an int32
        plain   weight in int8 or e4m3, weight_scale, weight_scale_inv or scale
        mxfp4   blocks, scales; two values a byte, a power of 2 as scale of 32 inputs
        pairs   the same as weight and scale
    """

    layout: str
    kind: str  # of ``Quantised``
    group: int | None = None  # inputs that share a scale; None: all
    block_outputs: int = 1  # outputs that share a scale; without a group, a matrix may have one
    symmetric: bool = True  # there are no zero points
    one_less: bool = False  # zero points are stored minus 1 (GPTQ's first format)
    bias_of_zeros: bool = False  # a model without biases may have biases of zeros next to matrices

    def num_groups(self, tensor: str, inputs: int) -> int:
        """The groups of a row of so many inputs, of which each has scales.

        One column of blocks may be wider than the matrix. Raises ``CheckpointError`` with the
        tensor's name if groups do not divide the row.
        """
        if self.group is None or (self.block_outputs > 1 and inputs <= self.group):
            return 1
        if inputs % self.group:
            raise CheckpointError(
                f"tensor {tensor} has {inputs} inputs, which groups of {self.group} do not divide; "
                "use a checkpoint with other groups"
            )
        return inputs // self.group

    def kept_block(self, outputs: int, groups: int) -> int:
        """Outputs that share scales in memory: a block's, which the fp8 kernels read, else 1.

        Where the last block is not whole, or one block has all inputs, each output has scales.
        """
        whole = self.kind == "fp8" and groups > 1 and outputs % self.block_outputs == 0
        return self.block_outputs if whole else 1


@dataclass(frozen=True)
class Rule:
    """The matrices that ``target`` matches; without ``weights`` they are not quantised.

    A target is a module's name, a class name, or a regular expression of names ("re:...").
    """

    target: str
    weights: WeightScheme | None


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised. ``ignore`` holds targets that are not quantised."""

    method: str  # the quant_method
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()

    def weights_of(self, module: str) -> WeightScheme | None:
        """How the weight of a linear layer, by its name, is stored; None if it is not quantised.

        Names take precedence over patterns and patterns over classes, then the first rule.
        """
        if any(match_rank(module, target) is not None for target in self.ignore):
            return None
        ranks = ((match_rank(module, rule.target), index) for index, rule in enumerate(self.rules))
        matches = [(rank, index) for rank, index in ranks if rank is not None]
        return self.rules[min(matches)[1]].weights if matches else None


def matches(pattern: str, module: str) -> bool:
    """True if a pattern of a file matches the start of a module's name.

    Raises ``CheckpointError`` for one that backtracks without end.
    """
    try:
        return regex.match(pattern, module, timeout=_SECONDS) is not None
    except TimeoutError:
        raise CheckpointError(
            f"quantization_config has the pattern {short(pattern)}, which takes more than "
            f"{_SECONDS:g} s for the name {short(module)}; use another checkpoint of this model"
        ) from None


def match_rank(module: str, target: str) -> int | None:
    """0, 1 or 2 if a target is the module's name, a pattern of it, or its class; else None."""
    if target == module:
        return 0
    if target.startswith(PATTERN):
        return 1 if matches(target.removeprefix(PATTERN), module) else None
    own = _CLASSES.get(module.rpartition(".")[2], _LINEAR)
    return 2 if target in own else None
