"""Beam search over the engine: each round is one request of one token for each beam.

A beam's prompt is an earlier one with a token more, so the prefix cache holds nearly all of it.
Rounds, scores and results are those of vLLM's ``LLM.beam_search``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxinfer.core.beam_search import BeamSearchParams
from jaxinfer.core.request import FinishReason, SamplingParams
from jaxinfer.engine.requests.outputs import PositionLogprobs


@dataclass(slots=True)
class BeamSearchSequence:
    """A beam: ``tokens`` begin with the prompt's, and ``logprobs`` has the candidates of each token
    after it. ``text`` is set in results, and is that of all tokens.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the token that ended it

    def followed_by(self, token_id: int, candidates: PositionLogprobs) -> BeamSearchSequence:
        """The beam with one of its candidates."""
        return BeamSearchSequence(
            [*self.tokens, token_id],
            [*self.logprobs, candidates],
            self.cum_logprob + candidates[token_id].logprob,
        )


@dataclass(slots=True)
class BeamSearchOutput:
    """The ``beam_width`` best continuations of a prompt, the best one first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt: ``extend`` it with the logprobs after each of its ``prompts``,
    until there are none; then ``best`` is the result.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_model_len: int,
    ) -> None:
        self._params = params
        self._eos = frozenset(eos_token_ids)
        self._max_length = min(len(prompt_token_ids) + params.max_tokens, max_model_len)
        self._open = [BeamSearchSequence(list(prompt_token_ids))]
        self._ended: list[BeamSearchSequence] = []

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The token ids of each open beam; none once the search is over."""
        return [] if self._is_over() else [tuple(beam.tokens) for beam in self._open]

    def extend(self, positions: Sequence[PositionLogprobs]) -> None:
        """Continue with the logprobs of the token after each of ``prompts``."""
        params = self._params
        longer: list[BeamSearchSequence] = []
        for beam, position in zip(self._open, positions, strict=True):
            for token_id in _likeliest(position, 2 * params.beam_width):
                candidate = beam.followed_by(token_id, position)
                if token_id in self._eos and not params.ignore_eos:
                    candidate.finish_reason = FinishReason.STOP
                    candidate.stop_reason = token_id
                    self._ended.append(candidate)
                else:
                    longer.append(candidate)
        self._open = sorted(longer, key=self._score, reverse=True)[: params.beam_width]

    def best(self) -> list[BeamSearchSequence]:
        """The ``beam_width`` beams with the highest scores, best first."""
        for beam in self._open:
            beam.finish_reason = FinishReason.LENGTH
        found = sorted([*self._ended, *self._open], key=self._score, reverse=True)
        return found[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos)
        return beam.cum_logprob / length**self._params.length_penalty

    def _is_over(self) -> bool:
        width = self._params.beam_width
        if not self._open or len(self._open[0].tokens) >= self._max_length:
            return True
        if len(self._ended) < width:
            return False
        if self._params.early_stopping:
            return True
        # no open beam can still become one of the best: logprobs only fall, and the penalty is
        # least at one of the two ends of the lengths that are left
        lengths = (len(self._open[0].tokens), self._max_length)
        penalty = self._params.length_penalty
        highest = max(beam.cum_logprob for beam in self._open)
        reachable = max(highest / length**penalty for length in lengths)
        return reachable <= sorted(map(self._score, self._ended), reverse=True)[width - 1]


def round_params(params: BeamSearchParams, num_logprobs: int = 0) -> SamplingParams:
    """The sampling parameters of every request of a search; ``num_logprobs``: as many are listed
    at each position, or more.
    """
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=max(2 * params.beam_width, num_logprobs),
        ignore_eos=True,
        detokenize=False,
    )


def _likeliest(position: PositionLogprobs, count: int) -> list[int]:
    """The likeliest tokens in order."""
    ranks: Mapping[int, int] = {
        token_id: one.rank for token_id, one in position.items() if one.rank is not None
    }
    return sorted((one for one in ranks if ranks[one] <= count), key=ranks.__getitem__)
