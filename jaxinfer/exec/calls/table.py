"""The calls of every engine, in the order in which a step makes those of one time."""

from __future__ import annotations

from jaxinfer.exec.calls.admit import ADMIT
from jaxinfer.exec.calls.digest import DIGEST
from jaxinfer.exec.calls.extras import EXTRAS
from jaxinfer.exec.calls.score import SCORE
from jaxinfer.exec.calls.steer import STEER

CALLS = (ADMIT, STEER, EXTRAS, SCORE, DIGEST)
