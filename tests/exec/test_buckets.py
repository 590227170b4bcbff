"""The bucket table covers every step that the scheduler can plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.buckets import bucket_table
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.stages import first_buckets, first_names
from jaxinfer.sched.choose import Budget
from jaxinfer.sched.state import Draft, Sequence, initial_state
from kit.default_limits import default_limits
from kit.drive import make_limits, make_request
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model


def table_of(
    seqs: int, tokens: int, factor: int = 8, mixed_start: int = 16, most_mixed: int | None = None
) -> tuple[Bucket, ...]:
    return bucket_table(
        seqs,
        tokens,
        decode_start=2,
        prefill_start=64,
        prefill_factor=factor,
        mixed_start=mixed_start,
        max_num_mixed_tokens=most_mixed,
    )


@dataclass(frozen=True)
class Sizes:
    """The arguments of a bucket table."""

    seqs: int
    tokens: int
    factor: int
    mixed_start: int
    most_mixed: int | None

    @property
    def most(self) -> int:
        """The largest number of prompt tokens in a mixed step."""
        return min(self.tokens, self.most_mixed or self.tokens)

    @property
    def table(self) -> tuple[Bucket, ...]:
        return table_of(self.seqs, self.tokens, self.factor, self.mixed_start, self.most_mixed)


any_sizes = st.builds(
    Sizes,
    seqs=st.integers(1, 300),
    tokens=st.integers(1, 9000),
    factor=st.integers(2, 8),
    mixed_start=st.integers(1, 300),
    most_mixed=st.none() | st.integers(1, 9000),
)


@given(any_sizes, st.data())
def test_every_step_finds_a_bucket(sizes: Sizes, data: st.DataObject) -> None:
    table = sizes.table
    decodes = data.draw(st.integers(0, sizes.seqs))
    assert decodes == 0 or any(bucket.holds(Bucket(decodes)) for bucket in table)
    if decodes < sizes.seqs:  # half of the largest mixed chunk fits next to any number of decodes
        longest = cdiv(sizes.most, 2) if decodes else sizes.tokens
        length = data.draw(st.integers(1, longest))
        assert any(bucket.holds(Bucket(decodes, length, 1)) for bucket in table)


@given(any_sizes)
def test_shapes_are_distinct_and_within_bounds(sizes: Sizes) -> None:
    table, seqs = sizes.table, sizes.seqs
    mixed = [bucket for bucket in table if bucket.num_decodes and bucket.num_prefills]
    assert all(bucket.num_prefill_tokens <= sizes.most for bucket in mixed)
    assert len({bucket.name for bucket in table}) == len(table)
    assert all(b.num_decodes <= seqs and b.num_prefill_tokens <= sizes.tokens for b in table)
    assert all(b.num_prefills <= min(seqs, max(b.num_prefill_tokens, 1)) for b in table)


@given(any_sizes, st.data())
def test_chunks_shrink_next_to_many_rows(sizes: Sizes, data: st.DataObject) -> None:
    most = sizes.most
    if mixed := [b for b in sizes.table if b.num_decodes and b.num_prefills]:
        rows = data.draw(st.sampled_from([bucket.num_decodes for bucket in mixed]))
        chunks = [bucket.num_prefill_tokens for bucket in mixed if bucket.num_decodes == rows]
        if rows == 16 and rows < min(sizes.mixed_start, sizes.seqs):
            assert chunks == [64]  # the small one, as all others have more rows
        elif 4 * rows <= most:
            assert max(chunks) == most
        assert rows + 2 * max(chunks) <= 2 * most + most // 4 + 1 or max(chunks) == cdiv(most, 2)
        assert all(chunk >= min(4 * rows, max(chunks)) for chunk in chunks)


def test_names() -> None:
    assert [b.name for b in table_of(2, 64)] == ["d1", "d2", "p64x2", "d2p64x2"]
    assert Bucket(2, 64, 2).num_tokens == 66
    assert Bucket(2, 64, 2).num_seqs == 4


def device_table(platform: str, max_num_seqs: int | None = None) -> tuple[Bucket, ...]:
    """The table of a file in configs/engine, for its number of sequences or the given one."""
    return default_limits(platform, max_num_seqs=max_num_seqs).buckets


def rows_at_borders(table: tuple[Bucket, ...], most: int) -> list[int]:
    """Numbers of decode rows at which the smallest bucket changes."""
    rows = {0, most, *(b.num_decodes + more for b in table for more in (0, 1))}
    return sorted(count for count in rows if count <= most)


def test_every_file_of_defaults_is_covered_below() -> None:
    folder = files("jaxinfer.configs").joinpath("engine")
    assert {file.name for file in folder.iterdir()} == {"cpu.toml", "gpu.toml"}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_step_of_the_defaults_has_a_bucket(platform: str) -> None:
    """For every number of sequences: all rows decode, or all but one with a scored prompt."""
    for seqs in range(1, 1025):
        table = device_table(platform, seqs)
        for decodes in rows_at_borders(table, seqs):
            assert decodes == 0 or any(b.holds(Bucket(decodes)) for b in table), (seqs, decodes)
            if decodes < seqs:
                scored = Bucket(decodes, 1, 1, scores=True)
                assert any(b.holds(scored) for b in table), (seqs, decodes)


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_the_first_buckets_of_a_gpu_hold_every_step(model: str) -> None:
    for seqs in (*range(1, 20), 64, 100, 256, 257, 511, 512, 640, 1000, 1024):
        limits = tiny_limits(max_num_seqs=1, max_num_batched_tokens=16)
        limits = replace(limits, max_num_seqs=seqs, buckets=device_table("gpu", seqs))
        program = Program(tiny_model(model)[0], limits, platform="gpu")
        first = first_buckets(program)
        state = initial_state(limits, first)  # raises if some step has no bucket
        assert state.num_slots == min(seqs, 256) == len(state.free_slots)
        assert len(first) <= 7 < len(limits.buckets) or seqs < 64
        assert {Bucket(1), Bucket(min(seqs, 256))} <= {*first}
        assert {name for b in first for name in program.names_of(b)} <= {*first_names(program)}
    of_cpu = Program(program.model, program.limits, platform="cpu")
    assert first_buckets(of_cpu) == of_cpu.limits.buckets


@pytest.mark.parametrize("seqs", [1, 2, 3, 6, 50, 221, 255, 300])
def test_rows_before_those_of_prompts_are_aligned_on_a_gpu(seqs: int) -> None:
    """A kernel of prompts gets the address of their part of an int32 array: ``exec.step.batch``."""
    for settings in ({}, {"mixed_bucket_start": 6}):
        limits = default_limits("gpu", max_num_seqs=seqs, **settings)
        mixed = [b.num_decodes for b in limits.buckets if b.num_decodes and b.num_prefills]
        assert not any(rows * 4 % 16 for rows in mixed) and bool(mixed) == (seqs > 1)
        program = Program(tiny_model("llama")[0], replace(limits, num_pages=(9,)), platform="gpu")
        assert initial_state(program.limits, first_buckets(program)).num_slots >= min(seqs, 256)
        odd = default_limits("cpu", max_num_seqs=seqs, **settings)
        assert seqs % 4 == 0 or {seqs} <= {b.num_decodes for b in odd.buckets}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("scored", [(), (0,), (3,), range(1024)], ids=["none", "1st", "4th", "all"])
def test_every_planned_step_has_a_bucket(platform: str, scored: Collection[int]) -> None:
    """Prefill rows are added as ``choose`` adds them; the fifth may take the whole budget."""
    plain, scoring = (
        Sequence(request, (0, 0, ""), IntLog(request.prompt_token_ids), 99, num_prefill_tokens=9)
        for request in (make_request("p", [1] * 9), make_request("s", [1] * 9, prompt_logprobs=0))
    )
    for seqs in (1, 2, 3, 7, 16, 17, 64, 65, 100, 200, 256, 257, 300, 511, 512, 640, 1000, 1024):
        limits = make_limits(max_num_seqs=seqs, buckets=device_table(platform, seqs))
        limits = replace(limits, max_num_batched_tokens=8192)
        state = initial_state(limits)
        for decodes in rows_at_borders(limits.buckets, seqs):
            for takes_all in (False, True):
                budget, prefills = Budget(Draft(state), decodes, 1), 0
                for number in range(seqs - decodes):
                    seq = scoring if number in scored else plain
                    if (most := budget.tokens_for(seq)) <= 0:
                        break
                    budget.add(seq, most if takes_all and number == 4 else 1)
                    prefills += 1
                size = Bucket(decodes, budget.used, prefills, budget.scores)
                assert any(bucket.holds(size) for bucket in state.buckets)


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        (
            "gpu",
            "d1 d8 d16 d32 d64 d128 d256 d512 "
            "p32x2 p64x4 p128x8 p256x16 p512x32 p1024x64 p2048x64 p4096x128 p8192x256 "
            "d64p256x16 d64p512x32 d64p1024x64 d128p512x32 d128p1024x64 d256p1024x64 d512p896x56 "
            "d16p64x4",
        ),
        ("cpu", "d1 d4 d8 d16 d32 p64x4 p256x16 d16p64x4 d16p256x16 d32p256x16"),
    ],
)
def test_the_defaults_of_a_device_are_few(platform: str, names: str) -> None:
    """A first start compiles every bucket, so a change here changes the time of a start."""
    assert " ".join(bucket.name for bucket in device_table(platform)) == names
