"""Members of specs by which the engine knows a layer without its type."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.nn.decoder_config import DecoderSpec
from kit.mixed_family import ExpertsSpec, RecurrentSpec, mixed_decoder
from kit.tiny_models import tiny_model


def words(decoder: DecoderSpec) -> list[tuple[str, str]]:
    """The words of the mixer and of the network of each layer."""
    return [(layer.mixer.words(), layer.ffn.words()) for layer in decoder.layers]


def test_defaults_of_a_mixer() -> None:
    """One without rope, attention heads or parts; ``tests/engine/test_contract.py`` serves it."""
    mixer = RecurrentSpec(align=8)
    assert mixer.rope is None and mixer.for_context(100) is mixer
    assert dict(mixer.points()) == {} and mixer.words() == ""
    with pytest.raises(ConfigError, match="RecurrentSpec cannot be divided among 2 devices"):
        mixer.share(2)


def test_experts_of_a_decoder() -> None:
    decoder = tiny_model("deepseek_v3")[0].config
    (dense, *_), count = decoder.layers, len(decoder.layers)
    assert list(decoder.experts) == [*range(1, count)]
    for i, experts in decoder.experts.items():
        ffn = decoder.layers[i].ffn
        assert experts == ffn
        changed = dataclasses.replace(experts, dummy_routing="same")
        assert ffn.with_experts(dummy_routing="same") == changed
    assert dense.ffn.with_experts(dummy_routing="same") is dense.ffn
    assert dict(tiny_model("llama")[0].config.experts) == {}
    assert ExpertsSpec().experts is None  # not the library's


def test_words() -> None:
    (dense, mixture, *_) = words(tiny_model("deepseek_v3")[0].config)
    assert dense == ("4 heads over latents of 16", "feed-forward 48")
    assert mixture == ("4 heads over latents of 16", "3 of 12 experts of 24")
    assert words(mixed_decoder("window", "recurrent")) == [
        ("4 query heads and 2 kv heads of 8", "feed-forward 48"),
        ("", ""),
    ]
