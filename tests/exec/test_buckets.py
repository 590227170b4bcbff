"""The bucket table covers every step that a schedule can ask for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.step import Bucket
from jaxinfer.exec.buckets import bucket_table

sizes = st.integers(1, 300)


def table_of(seqs: int, tokens: int) -> tuple[Bucket, ...]:
    return bucket_table(seqs, tokens, decode_start=2, prefill_start=64)


@given(sizes, st.integers(1, 9000), st.data())
def test_every_step_finds_a_bucket(seqs: int, tokens: int, data: st.DataObject) -> None:
    table = table_of(seqs, tokens)
    decodes = data.draw(st.integers(0, seqs))
    assert decodes == 0 or any(bucket.fits(decodes, 0, 0) for bucket in table)
    if decodes < seqs:  # a prefill row of any length joins any number of decodes
        length = data.draw(st.integers(1, tokens))
        assert any(bucket.fits(decodes, length, 1) for bucket in table)


@given(sizes, st.integers(1, 9000))
def test_shapes_are_distinct_and_within_bounds(seqs: int, tokens: int) -> None:
    table = table_of(seqs, tokens)
    assert len({bucket.name for bucket in table}) == len(table)
    assert all(b.num_decodes <= seqs and b.num_prefill_tokens <= tokens for b in table)
    assert all(b.num_prefills <= min(seqs, max(b.num_prefill_tokens, 1)) for b in table)


def test_names() -> None:
    assert [b.name for b in table_of(2, 64)] == ["d1", "d2", "p64x2", "d2p64x2"]
    assert Bucket(2, 64, 2).num_tokens == 66
    assert Bucket(2, 64, 2).num_seqs == 4
