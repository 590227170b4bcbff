"""The host arrays that only steps with prompts have: admissions, scores, steering."""

from __future__ import annotations

from itertools import batched

import msgspec

from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.in_flight import Prepared
from jaxinfer.exec.step.extras import pack_targets
from jaxinfer.exec.step.points import pack_steering
from jaxinfer.exec.step.slots import needs_admission


def with_prompts(prepared: Prepared, program: Program) -> Prepared:
    """``prepared`` with the arrays of its prompts and admissions."""
    plan = prepared.plan
    prefills, admissions = plan.prefills, plan.admissions
    drafts = program.drafter is not None  # a drafter reads all known tokens
    needed = [a for a in admissions if drafts or needs_admission(a.request)]
    scored = any(row.target_ids is not None for row in prefills)
    steers = [(a.slot, a.request.steering) for a in admissions]
    return msgspec.structs.replace(
        prepared,
        admissions=tuple(map(program.admission_rows, batched(needed, program.rows_per_admit))),
        targets=pack_targets(prefills, plan.bucket.num_prefill_tokens) if scored else None,
        steers=tuple(pack_steering(slot, one.values) for slot, one in steers if one),
    )
