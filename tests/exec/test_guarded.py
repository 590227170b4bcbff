"""A connector of the user's that fails or hangs: units are computed, and nothing waits for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.connector import Forms, Polled, Unit, UnitForm
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.tiers import key_in
from jaxinfer.engine.start.tiers import connected
from jaxinfer.exec.tiers.chain import Chain
from jaxinfer.exec.tiers.guarded import LOGGER, METHODS, Guarded
from jaxinfer.exec.tiers.host import HostTier

PAGE = UnitForm((((4,), np.dtype(np.float32)),))
FORMS: Forms = {0: PAGE}
KEYS = [key_in(0, number.to_bytes(16)) for number in range(4)]


class Failing(HostTier):
    """``method`` raises from now on."""

    method = ""

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "method"):
            return self._raise
        return object.__getattribute__(self, name)

    def _raise(self, *_: object) -> None:
        raise ConnectionError("the store is gone")


class Hanging(HostTier):
    """Its loads bring nothing."""

    def load(self, ticket: int, keys: object) -> None:
        """Nothing."""


def polled(chain: Chain) -> Polled:
    """The loads of a few polls."""
    found = Polled()
    for _ in range(4):
        found.loaded |= chain.poll().loaded
    return found


def save(chain: Chain, key: bytes) -> Polled:
    memory = chain.reserve(0, key)
    assert memory is not None and chain.save(Unit(0, key, memory))
    return polled(chain)


# a chain reserves nothing in the lower one
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("reserve", "close")])
def test_a_store_that_fails_is_not_used_any_more(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    upper, lower = HostTier(PAGE.num_bytes, FORMS), Failing(1 << 10, FORMS)
    chain = Chain(upper, Guarded(lower, "own.py:f"))
    for key in KEYS[:3]:  # the first two are in the store alone
        save(chain, key)
    chain.load(1, KEYS[:2])
    lower.method = method
    if method == "clear":
        chain.clear(b"new")
    found = save(chain, KEYS[3])
    if method != "clear":
        chain.load(2, KEYS[:1])
        found.loaded |= polled(chain).loaded
        assert found.loaded.keys() == {1, 2}
        assert found.loaded[2] == [None] or method == "finished"
    chain.finished(1)
    chain.finished(2)
    chain.poll()
    chain.clear(b"newer")
    save(chain, KEYS[0])
    chain.load(3, KEYS[:1])
    (unit,) = chain.poll().loaded[3]
    assert unit is not None and unit.key == KEYS[0], "the upper one goes on"
    chain.finished(3)
    assert not upper.num_pinned
    chain.close()
    assert len(caplog.records) == 1 and "own.py:f has failed (ConnectionError" in caplog.text


def test_a_load_that_does_not_end_fails(caplog: pytest.LogCaptureFixture) -> None:
    upper, lower = HostTier(PAGE.num_bytes, FORMS), Hanging(1 << 10, FORMS)
    chain = Chain(upper, Guarded(lower, "own.py:f", load_seconds=0.05))
    for key in KEYS[:2]:
        save(chain, key)
    chain.load(1, KEYS[:1])
    assert not chain.poll().loaded
    found = Polled()
    while not found.loaded:
        found = chain.poll(0.01)
    assert found.loaded == {1: [None]} and "brought nothing in 0.05 s" in caplog.text
    chain.finished(1)
    save(chain, KEYS[2])
    assert lower.match(KEYS[:3]) == KEYS[:3], "it is used further"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise OSError('no route')", r"cannot begin \(OSError: no route\)"),
        ("return object()", "returns no connector, as it has no match"),
    ],
)
def test_connectors_that_cannot_be_made(body: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def f(forms):\n    {body}\n")
    with pytest.raises(ConfigError, match=words):
        connected(f"{tmp_path}/own.py:f", FORMS)
