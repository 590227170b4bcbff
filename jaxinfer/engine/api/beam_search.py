"""``LLM.beam_search``: the searches of several prompts, in rounds of one batch each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.engine.beam_search import BeamSearch, BeamSearchOutput, round_params
from jaxinfer.engine.outputs import Delta, PositionLogprobs
from jaxinfer.engine.prompts import Prompt

if TYPE_CHECKING:
    from jaxinfer.core.beam_search import BeamSearchParams
    from jaxinfer.core.request import SamplingParams
    from jaxinfer.engine.loop.engine import Engine

    # as ``LLM.stream``
    type Run = Callable[[list[Prompt], list[SamplingParams]], Iterable[tuple[int, Delta]]]


def search_beams(
    engine: Engine,
    run: Run,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    advance: Callable[[float], None],
) -> list[BeamSearchOutput]:
    """The best continuations of each prompt. ``run`` answers the requests of a round, and
    ``advance`` is called with 1 after each.

    Raises ``RequestError`` before any prompt is started if one is invalid.
    """
    sampling = round_params(params)
    for number, prompt in enumerate(prompts):
        try:
            engine.check(prompt.token_ids, sampling)
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error}") from None
    eos, max_model_len = engine.facts.eos_token_ids, engine.limits.max_model_len
    searches = [BeamSearch(prompt.token_ids, params, eos, max_model_len) for prompt in prompts]
    while any(beams := [search.prompts for search in searches]):
        flat = [Prompt(None, one) for several in beams for one in several]
        found: dict[int, PositionLogprobs] = {}
        for number, delta in run(flat, [sampling] * len(flat)):
            if delta.error:
                raise EngineError(f"beam search: {delta.error}")
            found[number] = delta.logprobs[0]
        numbers = iter(range(len(flat)))
        for search, several in zip(searches, beams, strict=True):
            if several:
                search.extend([found[next(numbers)] for _ in several])
        advance(1)
    return [BeamSearchOutput(search.best()) for search in searches]
