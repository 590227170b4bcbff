"""The host arrays that only steps with prompts have: admissions, snapshots, scores, steering."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import batched

import msgspec
import numpy as np

from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.in_flight import Prepared
from jaxinfer.exec.step.extras import pack_targets
from jaxinfer.exec.step.points import pack_steering
from jaxinfer.exec.step.slots import needs_admission, pack_copies


def with_prompts(prepared: Prepared, program: Program) -> Prepared:
    """``prepared`` with the arrays of its prompts and admissions."""
    plan, limits = prepared.plan, program.limits
    prefills, admissions = plan.prefills, plan.admissions
    drafts = program.drafter is not None  # a drafter reads all known tokens
    needed = [a for a in admissions if drafts or needs_admission(a.request)]
    scored = any(row.target_ids is not None for row in prefills)
    first = limits.max_num_seqs + 1  # the row of the first snapshot
    restores = [(first + a.snapshot, a.slot) for a in admissions if a.snapshot is not None]
    saves = [(row.slot, first + row.snapshot) for row in prefills if row.snapshot is not None]
    steers = [(a.slot, a.request.steering) for a in admissions]
    return msgspec.structs.replace(
        prepared,
        admissions=tuple(map(program.admission_rows, batched(needed, program.rows_per_admit))),
        targets=pack_targets(prefills, plan.bucket.num_prefill_tokens) if scored else None,
        restores=copy_pairs(restores, program),
        saves=copy_pairs(saves, program),
        steers=tuple(pack_steering(slot, one.values) for slot, one in steers if one),
    )


def copy_pairs(pairs: Sequence[tuple[int, int]], program: Program) -> tuple[np.ndarray, ...]:
    """The arguments of the ``COPY`` calls for pairs of rows (from, to)."""
    return pack_copies(pairs, program.rows_per_copy, program.limits.max_num_seqs)
