"""The real SmolLM2-135M-Instruct, downloaded once into the user's cache, in float32.

The reference of all tokens is float32 on dequantised weights (``cpu_weights``).

Fixtures of the library's engine and of a server, each started once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from jaxinfer import LLM
from jaxinfer.bench.server_process import ServerProcess
from kit.golden import Golden, read_golden
from kit.openai_server import KEY, QUEUE, SECONDS


@pytest.fixture(scope="session")
def golden() -> Golden:
    return read_golden()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The default engine in float32; it must have no late compile after all tests that use it."""
    llm = LLM(cpu_weights="float32")
    yield llm
    assert llm.stats().num_late_compiles == 0


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """``jaxinfer serve``, with a key and a short queue."""
    flags = (f"--api-key={KEY}", f"--max-num-queued-reqs={QUEUE}", "--cpu-weights=float32")
    with ServerProcess(*flags) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id
