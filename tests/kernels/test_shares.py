"""Rows of large arrays are worked on in shares, each once, and an error is raised."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pallas_kernels.lib import shares
from pallas_kernels.lib.shares import in_shares
from pallas_kernels.native.library import library, pack_tiles


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shares, "SHARE_BYTES", 1000)


@pytest.mark.parametrize(
    ("rows", "step", "nbytes", "expected"),
    [
        pytest.param(100, 1, 1999, [(0, 100)], id="small"),
        pytest.param(100, 1, 2000, [(0, 50), (50, 100)], id="two"),
        pytest.param(101, 1, 9999, [(0, 26), (26, 52), (52, 78), (78, 101)], id="odd"),
        pytest.param(640, 64, 9999, [(0, 192), (192, 384), (384, 576), (576, 640)], id="steps"),
        pytest.param(64, 64, 9999, [(0, 64)], id="one step"),
    ],
)
def test_each_row_is_in_one_share(
    four_cores: None, rows: int, step: int, nbytes: int, expected: list[tuple[int, int]]
) -> None:
    found, lock = list[tuple[int, int]](), threading.Lock()

    def work(share: slice) -> None:
        with lock:
            found.append((share.start, share.stop))

    in_shares(rows, step, nbytes, work)
    assert sorted(found) == expected


def test_an_error_of_a_share_is_raised(four_cores: None) -> None:
    def work(share: slice) -> None:
        if share.start:
            raise ValueError(f"row {share.start}")

    with pytest.raises(ValueError, match="row 25"):
        in_shares(100, 1, 9999, work)


@pytest.mark.skipif(library() is None, reason="the library is not built")
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_tiles_packed_in_shares_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (640, 128), np.uint8)
    order = rng.permutation(4096).astype(np.int32)
    whole = pack_tiles(kind, values, order)
    monkeypatch.setattr(shares.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(shares, "SHARE_BYTES", 1000)
    np.testing.assert_array_equal(pack_tiles(kind, values, order), whole)
