"""Turns token events of one sequence into deltas: text, stop strings and named logprobs."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.step import TokenEvent, TokenLogprobs
from jaxinfer.engine.loop.loop import LOGGER
from jaxinfer.engine.requests.outputs import Delta, Logprob, PositionLogprobs, WeightSpan
from jaxinfer.text.detokenize import IncrementalDetokenizer, StopStrings
from jaxinfer.text.grammar.thinking import ThoughtTracker, token_bytes_of

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class SequenceProcessor:
    """Processes the events of one sequence; ``matched_stop`` is the stop string that ended it."""

    def __init__(
        self, request: Request, parent_id: str, index: int, tokenizer: Tokenizer | None
    ) -> None:
        self.parent_id = parent_id
        self.index = index
        self.num_prompt_tokens = len(request.prompt_token_ids)
        # of these, those that are looked up in the prefix cache, where there is one
        self.num_looked_up = self.num_prompt_tokens if request.sampling.reuses_prefix else 0
        self.matched_stop: str | None = None
        self._request = request
        self._tokenizer = tokenizer
        self._num_tokens = 0
        thinking = request.sampling.thinking if request.sampling.stop else None
        self._thoughts: ThoughtTracker | None = None
        if thinking is not None:
            self._thoughts = ThoughtTracker(thinking, token_bytes_of(tokenizer))
        self._is_before_content = False  # within thoughts, or the white space after them

    def process(self, event: TokenEvent, weight_version: int = 0) -> Delta:
        """The delta of one event, whose tokens were drawn with weights of this version. A matching
        stop string ends the sequence.
        """
        text, kept, start = "", len(event.token_ids), self._num_tokens
        for number, token_id in enumerate(event.token_ids):
            text += self._push(token_id, event)
            if self.matched_stop is not None:
                kept = number + 1
                break
        reason, stop_reason = event.finish_reason, event.stop_token_id
        if self.matched_stop is not None:
            reason, stop_reason = FinishReason.STOP, self.matched_stop
        elif reason is not None:
            text += self._flush()
            if self.matched_stop is not None:  # the held-back bytes completed a stop string
                reason, stop_reason = FinishReason.STOP, self.matched_stop
        output = event.output
        return Delta(
            request_id=self.parent_id,
            index=self.index,
            text=text,
            token_ids=event.token_ids[:kept],
            logprobs=tuple([self._named(position) for position in output.logprobs[:kept]]),
            prompt_logprobs=tuple([self._named(position) for position in output.prompt_logprobs]),
            num_cached_tokens=event.num_cached_tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            pooled=b"" if output.pooled is None else output.pooled.tobytes(),
            taps=output.taps,
            error=event.error,
            is_request_error=event.is_request_error,
            weight_versions=(WeightSpan(weight_version, start, start + kept),) if kept else (),
        )

    # Built with the first token: until a batch's first launch the device is idle.

    @cached_property
    def _stop(self) -> StopStrings:
        sampling = self._request.sampling
        return StopStrings(sampling.stop, sampling.include_stop_str_in_output)

    @cached_property
    def _detokenizer(self) -> IncrementalDetokenizer | None:
        sampling = self._request.sampling
        if self._tokenizer is None or not sampling.detokenize:
            return None
        return self._tokenizer.detokenizer(
            self._request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )

    def _push(self, token_id: int, event: TokenEvent) -> str:
        """Text of one token; a stop id that ends the sequence shows no text, as in vLLM."""
        self._num_tokens += 1
        if self._detokenizer is None:
            return ""
        ends = event.finish_reason is FinishReason.STOP and token_id in self._request.stop_ids
        if ends and not self._request.sampling.include_stop_str_in_output:
            return ""
        text = self._detokenizer.push((token_id,))
        if self._thoughts is not None:
            self._follow_thoughts(self._thoughts, token_id, text)
        return self._look_for_stop(text)

    def _follow_thoughts(self, thoughts: ThoughtTracker, token_id: int, text: str) -> None:
        was_open = thoughts.is_open
        thoughts.push(token_id)
        if was_open or thoughts.is_open:
            self._is_before_content = True
        elif text.strip():
            self._is_before_content = False

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._look_for_stop(self._detokenizer.flush())
        return text if self.matched_stop is not None else text + self._stop.flush()

    def _look_for_stop(self, text: str) -> str:
        """The text that can be returned now. As in vLLM, a stop string ends the sequence if it ends
        after ``min_tokens`` tokens; it may begin earlier. In thoughts there are no stop strings.
        """
        if self._is_before_content:
            return text
        may_end = self._num_tokens > self._request.sampling.min_tokens
        text, self.matched_stop = self._stop.push(text, may_end=may_end)
        return text

    def _named(self, position: TokenLogprobs) -> PositionLogprobs:
        """Logprobs in vLLM's form: {token id: Logprob}, the chosen token first."""
        named: PositionLogprobs = {}
        num_ranked = len(position.token_ids) - position.num_named
        ranks = (position.rank, *range(1, num_ranked), *(None,) * position.num_named)
        for token_id, logprob, rank in zip(
            position.token_ids, position.logprobs, ranks, strict=True
        ):
            if token_id not in named:
                piece = self._tokenizer.token_piece(token_id) if self._tokenizer else None
                named[token_id] = Logprob(logprob, rank, piece)
        return named


def delta_of(sequence: SequenceProcessor, event: TokenEvent, weight_version: int) -> Delta:
    """The delta of an event; if making its text fails, an error that ends this sequence."""
    try:
        return sequence.process(event, weight_version)
    except Exception as error:
        logging.getLogger(LOGGER).exception("request %s", sequence.parent_id)
        return Delta(
            request_id=sequence.parent_id,
            index=sequence.index,
            finish_reason=FinishReason.ERROR,
            error=f"the text of the answer cannot be made: {error}",
        )
