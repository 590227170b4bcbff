"""The wire layout between host and device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from jaxinfer.core.step import Bucket
from jaxinfer.exec.batch import ALIGN, BatchLayout

BUCKETS = (Bucket(1), Bucket(0, 64, 4), Bucket(3, 65, 5))


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_sections_are_aligned_and_apart(bucket: Bucket) -> None:
    """A GPU's kernels read a section where it lies and refuse an odd beginning."""
    layout = BatchLayout(bucket, max_pages_per_seq=7, sink_slot=4)
    numbered = np.arange(*layout.abstract().shape, dtype=np.int32)
    sections = layout.split(numbered)
    assert [section.size for section in sections] == list(layout.sizes())
    filled = [section for section in sections if section.size]
    assert all(section[0] % ALIGN == 0 for section in filled)
    assert all(first[-1] < second[0] for first, second in pairwise(filled))
    assert layout.pages_per_seq % ALIGN == 0  # so is any row of the page table
