"""``Routing``: how a router's logits become each token's experts and their weights."""

from __future__ import annotations

from typing import Literal, NamedTuple

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


class Groups(NamedTuple):
    """Experts in ``count`` groups of consecutive ones, of which a token may use only the best.

    A group's score is its best expert's, or the sum of those of its two best (DeepSeek-V2's and
    V3's ``group_limited_greedy`` and ``noaux_tc``).
    """

    count: int
    chosen: int
    score: Literal["best", "best_two"]


class Routing(NamedTuple):
    """The choice of ``chosen`` experts by their scores, the best first; of equal ones the lower.

    ``scores`` is the function of the logits, in float32 over all experts. (A softmax over the
    chosen logits alone, gpt-oss's, is a softmax over all of them, ``renormalised``.) Experts are
    chosen by score, plus a bias if there is one; their weights are the scores without the bias,
    divided by their sum if ``renormalised``, times ``scale``. Logits are multiplied by
    ``logit_scale`` first. With ``by_logits`` experts are chosen by logit, plus the bias.
    "sqrtsoftplus" is the square root of log(1 + exp(logit)) (DeepSeek-V4).

    "sparsemixer" (Liu et al. 2023, arXiv:2310.00811) chooses by logits, one expert after another.
    The weight of each is its softmax over the logits z that are not yet chosen and for which
    (best - z) / max(abs(z), best) is at most ``spread``.

    With ``shifted_among`` a token's choices are then shifted, modulo that number of experts, by a
    pseudo-random number: for random weights, see ``ref.shifted``.
    """

    chosen: int
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    renormalised: bool = False
    scale: float = 1.0
    groups: Groups | None = None
    logit_scale: float = 1.0
    spread: float = 0.0
    by_logits: bool = False
    shifted_among: int = 0
