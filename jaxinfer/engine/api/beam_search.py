"""``LLM.beam_search``: the searches of several prompts, in rounds of one batch each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import batched
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import RequestError
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.core.request import RequestSpec
from jaxinfer.engine.requests.beam_search import BeamSearch, BeamSearchOutput, round_params
from jaxinfer.engine.requests.outputs import Delta, PositionLogprobs
from jaxinfer.engine.requests.prompts import Prompt, parse_prompts

if TYPE_CHECKING:
    from jaxinfer.core.beam_search import BeamSearchParams
    from jaxinfer.engine.loop.engine import Engine

    type Run = Callable[[list[RequestSpec]], Iterable[tuple[int, Delta]]]  # as ``LLM.stream``


class BeamMethods(ABC):
    """``beam_search``."""

    _engine: Engine
    _progress: Progress

    @abstractmethod
    def stream(self, specs: Sequence[RequestSpec]) -> Generator[tuple[int, Delta]]:
        """The deltas of all requests, with their numbers."""

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of one or several prompts, as vLLM finds them.

        Prompts are as in ``generate``; ``concurrency_limit`` of them are searched side by side.
        """
        if lora_request is not None:
            raise RequestError("lora_request is not supported; leave it out")
        parsed = parse_prompts(prompts, self._engine.tokenizer)
        found: list[BeamSearchOutput] = []
        progress = self._progress if use_tqdm else NO_PROGRESS
        with progress.phase("beam search", "tokens") as advance:
            for some in batched(parsed, concurrency_limit or max(len(parsed), 1)):
                found += _search(self._engine, self.stream, some, params, advance)
        if (tokenizer := self._engine.tokenizer) is not None:
            for beam in (beam for output in found for beam in output.sequences):
                beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=False)
        return found


def _search(
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
            engine.check(RequestSpec(prompt.token_ids, sampling))
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error}") from None
    eos, max_model_len = engine.facts.eos_token_ids, engine.limits.max_model_len
    searches = [BeamSearch(prompt.token_ids, params, eos, max_model_len) for prompt in prompts]
    while any(beams := [search.prompts for search in searches]):
        flat = [RequestSpec(one, sampling) for several in beams for one in several]
        found: dict[int, PositionLogprobs] = {}
        for number, delta in run(flat):
            if delta.error:
                raise delta.failure("beam search: ")
            found[number] = delta.logprobs[0]
        numbers = iter(range(len(flat)))
        for search, several in zip(searches, beams, strict=True):
            if several:
                search.extend([found[next(numbers)] for _ in several])
        advance(1)
    return [BeamSearchOutput(search.best()) for search in searches]
