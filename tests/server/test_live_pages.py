"""Pages by window in the metrics: layers of Gemma 3 with a window hold a window and a chunk."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

import pytest

from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.shapes import cdiv
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.models.registry import build_model
from jaxinfer.server.metrics.registry import Metrics
from kit.default_limits import default_limits
from kit.fake_executor import VOCAB, FakeDevice
from kit.sample_metrics import MODEL, samples_of

CONTEXT, WINDOW = 8192, 512
NUM_GENERATED = 64
PROMPTS = (CONTEXT - NUM_GENERATED, 3000, 100)  # tokens; the first fills the context
GEMMA3_1B = MappingProxyType(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
    }
)


def live_pages(metrics: Metrics) -> dict[str, int]:
    """The gauge, by window."""
    return {
        dict(labels)["window"]: int(value)
        for (name, labels), value in samples_of(metrics).items()
        if name == "jaxinfer:live_pages" and MODEL.items() <= dict(labels).items()
    }


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_layers_with_a_window_hold_a_window_and_a_chunk(platform: str) -> None:
    groups = build_model(GEMMA3_1B, "bfloat16").state.groups
    windows = [group.window for group in groups]
    num_windowed = windows.count(WINDOW)
    assert windows == [None, *[WINDOW] * num_windowed] and num_windowed == 6
    num_pages = 1 + len(windows) * cdiv(sum(PROMPTS) + CONTEXT, 16)
    limits = default_limits(platform, max_model_len=CONTEXT, num_pages=num_pages, groups=groups)
    page_size, chunk = limits.page_size, limits.max_num_batched_tokens
    most_prefilling = cdiv(WINDOW - 1 + chunk, page_size) + 1
    most_decoding = cdiv(WINDOW - 1 + 1, page_size) + 1
    facts = ModelFacts("gemma3", VOCAB, (), SamplingParams())
    engine, metrics = Engine(FakeDevice(limits), limits, facts, None), Metrics("smol", limits)
    for number, length in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=NUM_GENERATED)
        prompt = [(token + number) % VOCAB for token in range(length)]
        engine.add_request(str(number), RequestSpec(prompt, sampling))
    num_tokens, longest = Counter[str](), 0
    while engine.has_work:
        news = engine.step()
        metrics.observe(news)
        num_tokens.update(delta.request_id for delta in news.deltas for _ in delta.token_ids)
        pages, num_running = live_pages(metrics), news.stats.num_running
        assert sum(pages.values()) == news.stats.num_live_pages
        assert metrics.snapshot()["pages"]["live_by_window"] == pages
        all_decode = len(num_tokens) == len(PROMPTS) and min(num_tokens.values()) > 1
        most = most_decoding if all_decode else most_prefilling
        assert pages[str(WINDOW)] <= num_running * num_windowed * most
        longest = max(longest, pages["none"])
    assert longest >= cdiv(CONTEXT - 1, page_size) + sum(n // page_size for n in PROMPTS[1:])
    assert live_pages(metrics) == {"none": 0, str(WINDOW): 0}
