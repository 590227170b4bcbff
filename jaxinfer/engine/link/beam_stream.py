"""``BeamStream``: the answers of a beam search, read like the ``Stream`` of a request."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from jaxinfer.core.beam_search import BeamSearchParams
from jaxinfer.core.request import FinishReason, RequestSpec
from jaxinfer.engine.link.client import EngineClient, Stream
from jaxinfer.engine.requests.beam_search import BeamSearch, BeamSearchSequence, round_params
from jaxinfer.engine.requests.outputs import Delta, PositionLogprobs


class BeamStream:
    """The ``beam_width`` best continuations of a prompt, each as one delta at the end.

    Each round opens a stream for every beam; ``take`` begins the next round. ``num_logprobs`` are
    listed at each position. Of the sampling in ``spec`` only ``skip_special_tokens`` counts.
    """

    def __init__(
        self,
        client: EngineClient,
        spec: RequestSpec,
        params: BeamSearchParams,
        *,
        num_logprobs: int,
        wake: asyncio.Event,
    ) -> None:
        self.n = params.beam_width
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self._client = client
        self._spec = spec
        self._sampling = round_params(params, num_logprobs)
        self._wake = wake
        limits, facts = client.limits, client.facts
        self._search = BeamSearch(
            tuple(spec.prompt_token_ids), params, facts.eos_token_ids, limits.max_model_len
        )
        self._num_cached_tokens: int | None = None  # of the prompt: of the first round
        self._closed = False
        self._found: dict[int, PositionLogprobs] = {}  # of this round, by beam
        self._round: list[Stream] = []
        self._begin_round()

    def take(self) -> list[Delta]:
        """The results once the search is over, else none; see ``Stream.take`` for errors."""
        for number, stream in enumerate(self._round):
            for delta in stream.take():
                if self._num_cached_tokens is None:
                    self._num_cached_tokens = delta.num_cached_tokens
                if delta.finish_reason is FinishReason.ABORT:
                    return self._aborted()
                self._found[number] = delta.logprobs[0]
        if self._closed or not self._round or len(self._found) < len(self._round):
            return []
        self._search.extend([self._found[number] for number in range(len(self._round))])
        self._end_round()
        if self._search.prompts:
            self._begin_round()
            return []
        return [self._delta(index, beam) for index, beam in enumerate(self._search.best())]

    def close(self) -> None:
        """Abort an unfinished search."""
        self._closed = True
        self._end_round()
        self._wake.set()

    def _begin_round(self) -> None:
        for token_ids in self._search.prompts:
            spec = replace(self._spec, prompt_token_ids=token_ids, sampling=self._sampling)
            self._round.append(self._client.open(spec, wake=self._wake, checked=True))

    def _end_round(self) -> None:
        for stream in self._round:
            stream.close()
        self._round, self._found = [], {}

    def _aborted(self) -> list[Delta]:
        """Ends without text: the engine has dropped its requests."""
        self._end_round()
        return [Delta("", index, finish_reason=FinishReason.ABORT) for index in range(self.n)]

    def _delta(self, index: int, beam: BeamSearchSequence) -> Delta:
        prompt = self._spec.prompt_token_ids
        token_ids = tuple(beam.tokens[len(prompt) :])
        text = ""
        if (tokenizer := self._client.tokenizer) is not None:
            skips = self._spec.sampling.skip_special_tokens
            detokenizer = tokenizer.detokenizer(prompt, skips)
            has_end = beam.stop_reason is not None  # the token that ends a text is not part of it
            text = detokenizer.push(token_ids[:-1] if has_end else token_ids) + detokenizer.flush()
        return Delta(
            "",
            index,
            text,
            token_ids,
            tuple(
                _chosen_first(position, token_id)
                for position, token_id in zip(beam.logprobs, token_ids, strict=True)
            ),
            num_cached_tokens=self._num_cached_tokens or 0,
            finish_reason=beam.finish_reason,
        )


def _chosen_first(position: PositionLogprobs, token_id: int) -> PositionLogprobs:
    return {token_id: position[token_id], **position}
