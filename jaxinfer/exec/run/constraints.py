"""The filters of constrained sequences: they follow the drawn tokens and write masks.

A mask depends on the token before, so it is known once the step before has been collected. The
step then waits for it (``MaskBoard``), unless the row has other extras; else the row is drawn again
after the step. An error of a filter is the result of its row and ends that request; its later rows
get a mask too, since the device waits for one, and their tokens are never used. A ``RequestError``
stays one: the request asks for what turned out to be impossible.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxinfer.core.constraint import ALL_TOKENS, TokenFilter
from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.core.request import Request
from jaxinfer.core.step import ScheduledSeq, SlotAdmission
from jaxinfer.exec.run.in_flight import LOGGER, Prepared, RowKey
from jaxinfer.exec.run.mask_board import MaskBoard
from jaxinfer.exec.step.batch import MASK_PLACE
from jaxinfer.exec.step.sampling import NO_MASK, NOT_FINITE
from jaxinfer.text.grammar.constraint import fill_masks


@dataclass
class _Followed:
    """A constrained sequence in a slot."""

    key: RowKey
    filter: TokenFilter | None = None
    error: JaxinferError | None = None


class Constraints:
    """The constrained sequences of an engine, by slot. One thread calls it."""

    def __init__(self, num_words: int, board: MaskBoard | None = None) -> None:
        self.num_words = num_words  # W: words of a mask
        self._board = board  # if steps read masks
        self.awaited: set[int] = set()  # slots whose masks are written on the board
        self._slots: dict[int, _Followed] = {}
        self._every_token: dict[int, np.ndarray] = {}  # uint32[count, W] of ones, by count
        self._writer = ThreadPoolExecutor(1, "masks")
        self._written: Future[None] | None = None  # the last masks on the board

    def needs_extras(self, request: Request) -> bool:
        """True if an executable after the step draws each of the request's tokens."""
        draws_again = request.constraint is not None and self._board is None
        return request.sampling.needs_extras or draws_again

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Follow the sequences that get slots; a preempted one continues after its tokens."""
        for new in admissions:
            constraint = new.request.constraint
            self.awaited.discard(new.slot)
            if constraint is not None and not self.needs_extras(new.request):
                self.awaited.add(new.slot)
            if constraint is None:
                self._slots.pop(new.slot, None)
                continue
            followed = _Followed((new.request.request_id, new.epoch))
            self._slots[new.slot] = followed
            drawn = new.token_ids.array()[new.num_prompt_tokens :].tolist()
            try:
                followed.filter = constraint.begin(drawn)
            except Exception as error:
                followed.error = _reported(followed.key, error)

    def begin(self, prepared: Prepared, *, known: bool) -> int:
        """Set where the next step finds its masks, and write them if they are known.

        Returns the step's number on the board.
        """
        assert self._board is not None, "no step waits"
        place = self._board.next_place()
        prepared.batch[MASK_PLACE] = place
        if known:
            self.write(prepared, place[-1])
        return place[-1]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the filters of requests that have ended."""
        ended = [slot for slot, one in self._slots.items() if one.key[0] in request_ids]
        for slot in ended:
            del self._slots[slot]
        self.awaited -= {*ended}

    def masks(self, rows: Sequence[ScheduledSeq], count: int) -> np.ndarray:  # uint32[count, W]
        """The masks of rows that draw next, and of padding; all tokens for rows without filter.

        The array must not be changed.
        """
        every_token = self._every_token.get(count)
        if every_token is None:
            every_token = np.full((count, self.num_words), ALL_TOKENS, np.uint32)
            self._every_token[count] = every_token
        constrained = {
            index: followed
            for index, row in enumerate(rows)
            if (followed := self._of(row)) is not None
        }
        if not constrained:
            return every_token
        masks = every_token.copy()
        self._fill(constrained, masks)
        return masks

    def write(self, prepared: Prepared, number: int) -> None:
        """Write the masks for which the step with this number waits, on a thread.

        The next step is launched at the same time: 64 masks take 1.3 ms, most of it without the
        GIL, of a step of 4.5 ms that takes the host as long (H100, and a slow CPU).
        """
        self._await_masks()
        rows = [prepared.plan.rows[i] for i in prepared.masked]
        followed = {row.slot: one for row in rows if (one := self._of(row)) is not None}
        slots = [row.slot for row in rows]
        self._written = self._writer.submit(self._write, followed, slots, number)

    def _write(self, followed: Mapping[int, _Followed], slots: Sequence[int], number: int) -> None:
        assert self._board is not None, "no step waits"
        masks = self._board.masks(number)
        for slot in {*slots} - self._fill(followed, masks):
            masks[slot] = ALL_TOKENS  # the row's result is an error, or its sequence has ended
        self._board.complete(number, slots)

    def _await_masks(self) -> None:
        """Wait until the thread has written its masks and the errors of their rows."""
        if self._written is not None:
            self._written.result()
            self._written = None

    def _fill(
        self,
        followed: Mapping[int, _Followed],  # by row of ``masks``
        masks: np.ndarray,  # uint32[N, W]
    ) -> set[int]:
        """Write masks; returns the rows that have one. The others' sequences have an error."""
        filters = {
            index: one.filter
            for index, one in followed.items()
            if one.filter is not None and not one.error
        }
        errors = fill_masks(filters, masks)
        for index, error in errors.items():
            followed[index].error = _reported(followed[index].key, error)
        return filters.keys() - errors.keys()

    def push(
        self, rows: Sequence[ScheduledSeq], token_ids: Sequence[tuple[int, ...]]
    ) -> dict[RowKey, JaxinferError]:
        """Pass each row's tokens to its filter; returns the errors of rows.

        A row whose mask could not be written has an error too, so its token is never used.
        """
        self._await_masks()
        errors: dict[RowKey, JaxinferError] = {}
        if not self._slots:
            return errors
        for row, drawn in zip(rows, token_ids, strict=False):  # padding follows
            followed = self._of(row) if row.samples else None
            if followed is None or NOT_FINITE in drawn or NO_MASK in drawn:  # these end the request
                continue
            try:
                if followed.filter is not None and not followed.error:
                    for token_id in drawn:
                        followed.filter.push(token_id)
            except Exception as error:
                followed.error = _reported(followed.key, error)
            if followed.error:
                errors[followed.key] = followed.error
        return errors

    def _of(self, row: ScheduledSeq) -> _Followed | None:
        """The sequence of a row, unless it has ended."""
        followed = self._slots.get(row.slot)
        return followed if followed and followed.key == (row.request_id, row.epoch) else None


def _reported(key: RowKey, error: Exception) -> JaxinferError:
    """Log an error of a filter; returns that of the request."""
    logging.getLogger(LOGGER).warning("request %s: its constraint failed: %s", key[0], error)
    if isinstance(error, RequestError):
        return error
    return EngineError(f"the answer's constraint cannot be continued: {error}")
