"""vLLM's fields of a beam search, and the fields that exclude one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from jaxinfer.core.beam_search import LENGTH_PENALTY_BOUNDS, MAX_BEAM_WIDTH, BeamSearchParams
from jaxinfer.server.api.fields import NEVER_TEXT, GenerationFields, field_error

# Fields that a search cannot follow, with the values that change nothing. Those that only choose
# among the tokens of a draw (temperature, top_p, seed, ...) have no effect, as in vLLM.
WITHOUT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "stream": (False,),
        "stop": ((), ""),
        "stop_token_ids": ((),),
        "min_tokens": (0,),
        "logit_bias": (None, {}),
        "presence_penalty": (None, 0.0),
        "frequency_penalty": (None, 0.0),
        "repetition_penalty": (None, 1.0),
        "allowed_token_ids": (None,),
        "bad_words": ((),),
        "logprob_token_ids": ((),),
        "prompt_logprobs": (None,),
        "taps": ((),),
        "steer": ((),),
    }
)


class BeamFields(GenerationFields, frozen=True, kw_only=True):
    """Fields of the routes that search: with ``use_beam_search`` the n answers are the n best
    beams of a search of that width. Without it the others have no effect.
    """

    use_beam_search: bool = False
    length_penalty: Annotated[
        float, Meta(ge=LENGTH_PENALTY_BOUNDS[0], le=LENGTH_PENALTY_BOUNDS[1])
    ] = 1.0
    early_stopping: bool | Annotated[str, Meta(pattern=NEVER_TEXT)] = False  # "never" is False

    def check(self) -> None:
        super().check()
        if not self.use_beam_search:
            return
        if self.n > MAX_BEAM_WIDTH:
            raise field_error(
                "n", f"n must be at most {MAX_BEAM_WIDTH} with use_beam_search, got {self.n}"
            )
        wrong = [name for name in WITHOUT if getattr(self, name) not in WITHOUT[name]]
        if self.form_field is not None:
            wrong.append(self.form_field)
        if wrong:
            raise field_error(wrong[0], f"{wrong[0]} cannot be used with use_beam_search")

    def beam_search(self, max_tokens: int) -> BeamSearchParams:
        """The search that finds the answers, of at most ``max_tokens``."""
        return BeamSearchParams(
            self.n,
            max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping is True,
        )
