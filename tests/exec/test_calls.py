"""An executable beside the step is one record: a family outside the library brings two of its own.

``tests/engine/test_contract.py`` serves with them.
"""

from __future__ import annotations

import pickle
from dataclasses import replace

from msgspec.structs import replace as with_fields

from jaxinfer.exec.compile.fingerprint import Fingerprint
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.program import Program
from kit.engines import tiny_limits
from kit.mixed_family import mixed_model

MODEL, _ = mixed_model("recurrent", "full")
PLAIN = replace(MODEL, family=replace(MODEL.family, calls=()))
LIMITS = with_fields(tiny_limits(enable_prefix_caching=False), groups=MODEL.state.groups)
OWN, OTHER = (Program(model, LIMITS) for model in (MODEL, PLAIN))


def test_memory_plan() -> None:
    own, other = (program_memory(program, None) for program in (OWN, OTHER))
    assert own.slot_bytes == other.slot_bytes + 4 * (LIMITS.max_num_seqs + 1)
    assert own.workspaces == {**other.workspaces, "tally": 1_000_000}


def test_fingerprint() -> None:
    own, other = (Fingerprint.of(program) for program in (OWN, OTHER))
    assert {*own.model} - {*other.model} == {"call forget", "call tally"}


def test_another_process_can_compile_them() -> None:
    calls = MODEL.family.calls
    assert pickle.loads(pickle.dumps(calls)) == calls
