"""``BeamSearchParams``: the settings of a beam search, under vLLM's names."""

from __future__ import annotations

import msgspec

from jaxinfer.core.checks import as_float, as_int
from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.sampling_checks import MAX_LOGPROBS

LENGTH_PENALTY_BOUNDS = (-20.0, 20.0)  # a million tokens to this power are still a float
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # of each beam the 2 * width likeliest tokens are looked at


class BeamSearchParams(msgspec.Struct, frozen=True):
    """How to search for the likeliest continuations of a prompt.

    A continuation's score is its logprob, the sum over its tokens, divided by length **
    ``length_penalty``, where the length counts prompt and continuation without the token that ends
    it, as in vLLM (transformers counts the continuation alone). With ``early_stopping`` (not in
    vLLM) a search ends once ``beam_width`` continuations have ended. ``temperature`` and
    ``include_stop_str_in_output`` exist so that vLLM's scripts run: scores are of the model's own
    distribution, as in vLLM, and no stop string ends a beam.

    Raises ``RequestError`` naming the field if a value is invalid.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool = False

    def __post_init__(self) -> None:
        try:
            SamplingParams(
                n=self.beam_width,
                max_tokens=self.max_tokens,
                ignore_eos=self.ignore_eos,
                temperature=self.temperature,
                include_stop_str_in_output=self.include_stop_str_in_output,
            )
        except RequestError as error:
            field, _, words = str(error).partition(" ")
            field = "beam_width" if field == "n" else field
            raise RequestError(f"{field} {words}") from None
        if self.beam_width > MAX_BEAM_WIDTH:
            raise RequestError(
                f"beam_width must be at most {MAX_BEAM_WIDTH}, got {self.beam_width}"
            )
        if as_int(self.max_tokens) is None:
            raise RequestError("max_tokens must be a whole number, got None")
        penalty, (low, high) = as_float(self.length_penalty), LENGTH_PENALTY_BOUNDS
        if penalty is None or not low <= penalty <= high:
            raise RequestError(
                f"length_penalty must be a number in [{low:g}, {high:g}], "
                f"got {self.length_penalty!r}"
            )
        if type(self.early_stopping) is not bool:
            raise RequestError(f"early_stopping must be True or False, got {self.early_stopping!r}")
