"""Seeds of sequences: the user's, or derived ones."""

from __future__ import annotations

from jaxinfer.core.request import SamplingParams


def seed_of(sampling: SamplingParams, index: int, arrival: int, engine_seed: int) -> int:
    """The seed of sequence ``index`` of a request: the user's for the first one, a derived one for
    all others.
    """
    if sampling.seed is None:
        return _mix(engine_seed, arrival)
    return sampling.seed if index == 0 else _mix(sampling.seed, index)


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele et al., OOPSLA 2014): distinct, unrelated seeds from a counter."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    z = (seed + (index + 1) * 0x9E37_79B9_7F4A_7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D0_49BB_1331_11EB) & mask
    return z ^ z >> 31
