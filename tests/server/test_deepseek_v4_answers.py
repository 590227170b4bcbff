"""DeepSeek-V4 over HTTP: a tiny model of random weights with the published chat template.

Its thoughts are any bytes and end at their budget. The form of a required call allows it one city.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from kit.answer_matrix import Seen, read, read_stream
from kit.engines import compiled_for, engine_of, tiny_limits
from kit.scripted import TEMPLATES
from kit.server import Serving, serving
from kit.tiny_models import tiny_model

pytest.importorskip("llguidance")
pytestmark = pytest.mark.nightly  # the steps compile for 20 s

LENGTH = 2560  # the template describes tools in 1,500 bytes, which are tokens here
BUDGET = 12
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "Is it warm in Rome?"}]
THINKS = {"chat_template_kwargs": {"thinking": True}, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": QUESTION,
            "max_tokens": 300,
            "thinking_token_budget": BUDGET,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": QUESTION[0]["content"],
            "max_output_tokens": 300,
            "thinking_token_budget": BUDGET,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": QUESTION,
            "max_tokens": 300,
            "thinking": {"type": "enabled", "budget_tokens": BUDGET},
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
}


def engine() -> Engine:
    model, params = tiny_model("deepseek_v4")
    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=256, max_model_len=LENGTH)
    limits = replace(
        limits,
        buckets=(Bucket(2), Bucket(0, 256, 2), Bucket(2, 256, 2, scores=True)),
        groups=model.state.groups,
        num_pages=(3 * LENGTH // limits.page_size,) * len(model.state.bytes_per_entry),
        num_snapshots=8,
        align=model.state.align,
    )
    program = Program(model, limits)
    executor = Executor(program, compiled_for(program, extras=False), params, *init_state(program))
    template = (TEMPLATES / "deepseek-v4.jinja").read_text("utf-8")
    return engine_of(executor, limits, chat_template=template)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(engine()) as running:
        yield running
        running.wait_until_idle()


@pytest.mark.parametrize("api", BODIES)
def test_a_call_after_thoughts(server: Serving, api: str) -> None:
    path, body = BODIES[api]
    whole = read(api, server.post(path, **THINKS, **body).json())
    arguments = json.dumps({"city": "Rome"}, separators=(",", ":"))
    assert 0 < len(whole.reasoning) <= BUDGET
    assert whole == Seen(whole.reasoning, "", (("weather", arguments),), "tool_calls")
    streamed = server.post(path, stream=True, **THINKS, **body)
    assert read_stream(api, streamed.text) == whole
