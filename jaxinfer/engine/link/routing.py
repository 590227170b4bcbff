"""``Router``: the replica for a request, by the prefix that it may have kept and by its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

BLOCK_TOKENS = 64  # prefixes are compared in blocks of so many
MAX_BLOCKS = 512  # of a prompt: 32,768 tokens
REMEMBERED = 1 << 16  # blocks of each replica, the last used ones: 4 million tokens
# A replica with the prefix is not chosen if it has so many more open tokens than the least loaded
# one as it saves, and a little more for a start: a prompt of 16k tokens waits for it, a greeting
# does not.
SLACK_TOKENS = 2048
LEAST_TOKENS = 256  # of an open request, whose answer is a load beside its prompt
PREFIX, LEAST_LOADED, ROUND_ROBIN = POLICIES = ("prefix", "least-loaded", "round-robin")


class Router:
    """Counts the open tokens of each replica, and remembers which prompts it has had.

    It reads no clock and does no I/O, so ``jaxinfer simulate`` uses it as well.
    """

    def __init__(self, count: int, policy: str = PREFIX) -> None:
        """``policy``: one of ``POLICIES``; the others are there to be compared with."""
        self.count, self.policy = count, policy
        self._open_tokens = [0] * count
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self._turn = 0  # of those that are equal

    def choose(self, tokens: Sequence[int], ranks: Collection[int], salt: str = "") -> int:
        """The rank for a prompt, one of ``ranks``. Prompts with another ``salt`` share no prefix.

        It is the replica with the fewest tokens to compute: those of its open requests, and those
        of this prompt that it does not know. Equal ones take turns. Without the policy "prefix" no
        prompt is known, and with "round-robin" all are equal.
        """
        blocks = tuple(_blocks(tokens, salt)) if self.policy == PREFIX else ()
        least = min(self._open_tokens[rank] for rank in ranks)

        def cost(rank: int) -> tuple[int, int]:
            turn = (rank - self._turn) % self.count
            if self.policy == ROUND_ROBIN:
                return 0, turn
            waiting = max(self._open_tokens[rank] - least - SLACK_TOKENS, 0)
            known = self._num_known(rank, blocks) * BLOCK_TOKENS
            # without a known prefix the load alone decides
            load = waiting if known else self._open_tokens[rank] - least
            return load - known, turn

        chosen = min(ranks, key=cost)
        self._turn = (chosen + 1) % self.count
        return chosen

    def began(self, rank: int, tokens: Sequence[int], salt: str = "") -> None:
        """A replica got this prompt."""
        self._open_tokens[rank] += max(len(tokens), LEAST_TOKENS)
        if self.policy != PREFIX:
            return
        known = self._known[rank]
        for block in _blocks(tokens, salt):
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)

    def ended(self, rank: int, num_tokens: int) -> None:
        """A request with a prompt of so many tokens has ended."""
        self._open_tokens[rank] -= max(num_tokens, LEAST_TOKENS)

    def forget(self) -> None:
        """The replicas have dropped all prefixes."""
        for known in self._known:
            known.clear()

    def lost(self, rank: int) -> None:
        """A replica has ended, and with it its requests and its cache."""
        self._open_tokens[rank] = 0
        self._known[rank].clear()

    def _num_known(self, rank: int, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks the replica knows."""
        known = self._known[rank]
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))


def _blocks(tokens: Sequence[int], salt: str) -> Iterator[int]:
    """The hash of each whole block, with the salt and all tokens before it."""
    chained = hash(salt)
    end = min(len(tokens) // BLOCK_TOKENS, MAX_BLOCKS) * BLOCK_TOKENS
    for start in range(0, end, BLOCK_TOKENS):
        chained = hash((chained, *tokens[start : start + BLOCK_TOKENS]))
        yield chained
