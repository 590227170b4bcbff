"""The real SmolLM2-135M-Instruct, downloaded once into the user's cache, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxinfer import LLM
from kit.golden import Golden, read_golden


@pytest.fixture(scope="session")
def golden() -> Golden:
    return read_golden()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The default engine; every test that serves with it must leave no late compile behind."""
    llm = LLM()
    yield llm
    assert llm.stats().num_late_compiles == 0
