"""config.json: errors name missing and unsupported keys; old and new spellings are equal."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.core.errors import ConfigError, UnknownArchitectureError
from jaxinfer.models import build_model, forward, known_architectures
from jaxinfer.models.registry import decoder_config, text_config
from jaxinfer.nn.decoder_config import AttentionConfig, FeedForwardConfig
from jaxinfer.nn.state import used_chunk
from kit.tiny_models import NAMES, random_params, tiny_config

# Falcon's published files do not have it; of the others transformers has another default.
HAS_DEFAULT = [
    *((name, "max_position_embeddings") for name in ("falcon", "falcon_7b", "falcon_alibi")),
    *((name, "rms_norm_eps") for name in ("nanochat", "bitnet", "hyperclovax")),
]
REQUIRED = [
    (name, key)
    for name in NAMES
    for key in (
        ("vocab_size", "n_embd", "n_head", "n_layer", "n_positions")
        if name == "gpt2"
        else (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "layer_norm_eps" if name == "stablelm" else "rms_norm_eps",
        )
    )
    if key in tiny_config(name)  # a model whose layers all have experts needs no intermediate_size
    and (name, key) not in HAS_DEFAULT
]


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_a_missing_key_is_named(name: str, key: str) -> None:
    config = tiny_config(name)
    del config[key]
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        build_model(config, "float32")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"hidden_size": "many"}, "'hidden_size' must be a positive integer"),
        ("llama", {"hidden_act": "xielu"}, "'hidden_act' is 'xielu'; known activations are gelu"),
        ("llama", {"hidden_act": ["silu"]}, "'hidden_act' is"),
        ("llama", {"mlp_bias": 1}, "'mlp_bias' must be true or false"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of 'num_key_value_heads' 3"),
        (
            "llama",
            {"rope_scaling": {"type": "ntk"}},
            "'ntk' is unknown; use",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "base": 1}}, "no key 'base'"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ("qwen3", {"partial_rotary_factor": 0}, "'partial_rotary_factor' is 0"),
        ("qwen3", {"head_dim": 15}, "'head_dim' must be even"),
        ("phi3", {"attention_bias": True}, "'attention_bias' is True"),
        ("phi3", {"full_attn_mod": 2}, "'full_attn_mod' is 2"),
        ("phi3", {"partial_rotary_factor": 0.05}, "'partial_rotary_factor' is 0.05; it must be"),
        ("phi", {"partial_rotary_factor": 0.2}, "gives 1 of the 8 components of a head, which"),
        ("mimo_v2_flash", {"v_head_dim": 32}, "'v_head_dim' is 32, and values that are wider than"),
        ("hunyuan_moe", {"moe_topk": [1]}, r"'moe_topk' is \[1\], which has no value of layer 1"),
        ("llama", {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ("mistral", {"sliding_window": 0}, "'sliding_window' must be a positive integer"),
        ("qwen2", {"layer_types": ["full_attention"]}, "'layer_types' must hold"),
        ("qwen2", {"layer_types": 2}, "'layer_types' must hold"),
        ("qwen2", {"layer_types": [[], {}]}, "'layer_types' must hold"),
        ("qwen2", {"max_window_layers": "1"}, "'max_window_layers' must be an integer from 0"),
        ("llama", {"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        ("llama", {"rope_parameters": [1]}, "'rope_parameters' must be an object"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope type .* is unknown"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "'architectures' must be a list"),
        ("llama", {"architectures": [1]}, "'architectures' must be a list"),
        ("gpt2", {"activation_function": "prelu"}, "'activation_function' is 'prelu'"),
        ("gpt2", {"scale_attn_weights": 1}, "'scale_attn_weights' must be true or false"),
        ("gpt2", {"add_cross_attention": True}, "'add_cross_attention' is True"),
        ("gpt2", {"n_head": 5}, "not a multiple of 'n_head' 5"),
        ("llama", {"sliding_window": 7}, "'sliding_window' is 7, and LlamaForCausalLM has no"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "no window is switched on"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "no window is switched on",
        ),
    ],
)
def test_a_wrong_value_is_named(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model({**tiny_config(name), **change}, "float32")


@pytest.mark.parametrize("name", ["ernie4_5", "glm", "seed_oss"])
def test_a_null_width_of_heads_is_derived_and_a_missing_one_has_a_default(name: str) -> None:
    config = tiny_config(name)
    derived = config["hidden_size"] // config["num_attention_heads"]
    widths = [{"head_dim": None}, {"head_dim": derived}]
    one, other = (build_model({**config, **width}, "float32") for width in widths)
    assert one == other
    del config["head_dim"]
    mixer = build_model(config, "float32").config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    assert mixer.head_dim == 128


_KIMI = {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}


def _blocks(**attention: Any) -> dict[str, Any]:
    """Four layers of Nemotron-NAS whose attention has these keys."""
    ffn = {"intermediate_size": 48}
    return {"block_configs": [{"attention": {"n_heads_in_group": 2} | attention, "ffn": ffn}] * 4}


_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 5}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_5", {"layer_types": ["spiral_attention"] * 3}, "'layer_types' must hold"),
        ("qwen3_5", {"hidden_act": "xielu"}, "'hidden_act' is 'xielu', and this family supports"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "axial"}}, "rope type 'axial' is unknown"),
        (
            "kimi_linear",
            {
                "linear_attn_config": {
                    **_KIMI,
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2],
                    "decay": "square",
                }
            },
            "has the key 'decay', which KimiLinearForCausalLM does not know",
        ),
        ("nemotron_nas", {"block_configs": None}, "'block_configs' is None; it must be a list"),
        ("nemotron_nas", {"block_configs": [{}] * 3}, "must be a list of the blocks of each of"),
        ("nemotron_nas", {"block_configs": [{"ffn": {}}] * 4}, "must have objects 'attention' and"),
        ("nemotron_nas", _blocks(n_heads_in_group=3), "is 3, and must divide"),
        ("nemotron_nas", _blocks(replace_with_linear=True), "has 'replace_with_linear' True"),
        ("nemotron_nas", {"num_key_value_heads_per_layer": [3] * 4}, "a number that divides"),
        (
            "kimi_linear",
            {"linear_attn_config": {**_KIMI, "kda_layers": [1], "full_attn_layers": [2]}},
            "must have each of the 3 layers",
        ),
        (
            "phi3",
            {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 128},
            "'(short|long)_factor' must be a list of . positive numbers",
        ),
    ],
)
def test_a_wrong_layer_rope_or_decay_is_named(
    name: str, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model({**tiny_config(name), **change}, "float32")


def test_kv_heads_by_layer_are_those_of_blocks() -> None:
    """DeciLM-7B lists the KV heads alone; all its layers have both blocks."""
    config, ffn = (
        {**tiny_config("nemotron_nas"), "intermediate_size": 48},
        {"intermediate_size": 48},
    )
    blocks = [{"attention": {"n_heads_in_group": n}, "ffn": ffn} for n in (1, 4, 2, 1)]
    by_blocks = build_model(config | {"block_configs": blocks}, "float32")
    del config["block_configs"]
    listed = build_model(config | {"num_key_value_heads_per_layer": [4, 1, 2, 4]}, "float32")
    assert listed.config == by_blocks.config


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, and at most"),
        ("gpt2", {"n_layer": 10**9}, "'n_layer' is 1000000000, and at most 10000 is supported"),
        ("deepseek_v3", {"n_routed_experts": 2**63}, "'n_routed_experts' is 9223.*, and at most"),
        ("qwen3_moe", {"num_experts": 100_001}, "'num_experts' is 100001, and at most 100000"),
        (
            "mixtral",
            {"num_local_experts": 10**400},
            "'num_local_experts' is 1000.*\\.\\.\\., and at",
        ),
        ("mixtral", {"num_local_experts": 80_000}, "have 240000 experts together, and at most"),
        ("llama", {"vocab_size": 2**31}, "'vocab_size' is 2147483648, and at most 2147483647"),
        ("llama", {"hidden_size": 2**40}, "'hidden_size' is 1099511627776, and at most"),
        ("llama", {"max_position_embeddings": 2**31}, "'max_position_embeddings' is 2147483648"),
        ("llama", {"head_dim": 2**17}, "'head_dim' is 131072, and at most 65536 is supported"),
        ("gemma3", {"sliding_window": 2**33}, "'sliding_window' is 8589934592, and at most"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 1e30}}, "context of .* tokens"),
        ("llama", {"rms_norm_eps": 10**400}, "'rms_norm_eps' must be a positive number, got 10"),
        ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a positive number"),
        ("qwen3_moe", {"mlp_only_layers": [0] * 10**5}, "'mlp_only_layers' must be a list of lay"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "'mlp_only_layers' must be a list of layers"),
        ("llama", {"layer_types": ["full_attention"] * 10**5}, "'layer_types' must hold .* of the"),
        ("llama", {"architectures": [["LlamaForCausalLM"]]}, "'architectures' must be a list of"),
        ("llama", {"architectures": 5, "text_config": {}}, "'architectures' must be a list of"),
    ],
)
def test_sizes_are_bounded_before_anything_is_made_of_them(
    name: str, change: dict[str, object], message: str
) -> None:
    config = {**tiny_config(name), **change}
    if name == "mixtral":
        config["num_hidden_layers"] = 3
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message) as error:
            build_model(decoder_config(text_config(config)), "float32")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 400


WRONG = (-1, 0, True, 1.5, 2**31, 2**63, -(2**63), float("nan"), float("inf"), "5", [1], {"a": 1})


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_number_is_refused_or_read(name: str) -> None:
    """No other exception, whatever a key that has a number has instead; no key takes them all."""
    config = tiny_config(name)
    keys = [key for key, value in config.items() if isinstance(value, int | float)]
    refused = set()
    for key in keys:
        for value in WRONG:
            try:
                build_model({**config, key: value}, "float32")
            except ConfigError as error:
                assert key in str(error) or "config key" in str(error)
                refused.add(key)
    assert refused == {*keys}


def test_keys_of_the_whole_model_and_of_its_text() -> None:
    """The tied head and token ids of the whole win; a quantisation of both must be the same."""
    scheme = {"quant_method": "fp8"}
    own = {**tiny_config("gemma4"), "tie_word_embeddings": True, "eos_token_id": None}
    own |= {"quantization_config": scheme}
    whole = {"architectures": own["architectures"][1:], "text_config": own, "eos_token_id": 3}
    found = text_config({**whole, "tie_word_embeddings": False})
    assert (found["eos_token_id"], found["tie_word_embeddings"]) == (3, False)
    assert text_config(whole)["tie_word_embeddings"]
    assert text_config({**whole, "quantization_config": scheme})["quantization_config"] == scheme
    with pytest.raises(ConfigError, match="'quantization_config' is .*awq.*, and .*fp8.* in 'text"):
        text_config({**whole, "quantization_config": {"quant_method": "awq"}})


def test_what_a_text_decoder_does_not_read() -> None:
    """PaliGemma's prompts with images alone see what follows; Qwen3-VL's experts are renormalised
    whatever the config says; the text of Qwen's Omni models is two levels down.
    """
    own = {**tiny_config("gemma"), "model_type": "gemma", "use_bidirectional_attention": True}
    whole = {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": own}
    assert not text_config(whole)["use_bidirectional_attention"]
    whole["architectures"] = ["LlavaForConditionalGeneration"]
    assert text_config(whole)["use_bidirectional_attention"]
    own = {**tiny_config("qwen3_moe"), "model_type": "qwen3_vl_moe_text", "norm_topk_prob": False}
    inner = {"text_config": own, "tie_word_embeddings": False, "model_type": "thinker"}
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": inner}
    assert text_config(whole)["norm_topk_prob"]
    assert text_config(whole)["architectures"][0] == "Qwen3MoeForCausalLM"


def test_token_ids_of_the_whole_model_win() -> None:
    """Gemma 3 and 4 have 1 as the end of a text, and [1, 106] in the config around that."""
    own = {**tiny_config("gemma4"), "eos_token_id": 1, "bos_token_id": 2}
    whole = {"architectures": own["architectures"][1:], "text_config": own}
    found = text_config({**whole, "eos_token_id": [1, 106], "bos_token_id": None})
    assert (found["eos_token_id"], found["bos_token_id"]) == ([1, 106], 2)


def test_an_unknown_architecture_names_the_nearest_known_ones() -> None:
    others = len(known_architectures()) - 3
    words = f"LamaForCausalLM is unknown; known are LlamaForCausalLM, .* and {others} others"
    with pytest.raises(UnknownArchitectureError, match=words):
        build_model({"architectures": ["LamaForCausalLM"]}, "float32")


def test_a_config_without_architecture_says_so() -> None:
    with pytest.raises(ConfigError, match="'architectures' is missing"):
        build_model({}, "float32")


def test_a_family_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxinfer.models.gpt2", None)
    with pytest.raises(ImportError) as error:
        build_model(tiny_config("gpt2"), "float32")
    assert "jaxinfer.models.gpt2" in str(error.value.__notes__)


def test_derived_and_stated_values() -> None:
    llama = build_model({**tiny_config("llama"), "num_key_value_heads": None}, "float32")
    assert llama.state.arrays[0].shape == (4, 8)  # no key: multi-head attention
    assert build_model(tiny_config("qwen3"), "float32").state.arrays[0].shape == (2, 16)


@pytest.mark.parametrize("key", ["hidden_act", "mlp_bias", "rope_scaling", "attention_bias"])
def test_null_means_absent(key: str) -> None:
    config = tiny_config("llama")
    without = {k: v for k, v in config.items() if k != key}
    assert build_model({**config, key: None}, "float32") == build_model(without, "float32")


def test_sliding_windows_reach_the_kv_spec() -> None:
    def windows(name: str, **change: object) -> list[int | None]:
        model = build_model({**tiny_config(name), **change}, "float32")
        return [layer.mixer.window for layer in model.config.layers]

    assert windows("mistral") == [7, 7]
    assert windows("phi3") == [7, 7]
    assert windows("phi3", sliding_window=512) == [None, None]  # as long as the context
    assert windows("mistral", sliding_window=None) == [None, None]
    interleaved = ["full_attention", "sliding_attention"]
    assert windows("mistral", layer_types=interleaved) == [None, 7]
    assert windows("llama", sliding_window=7, use_sliding_window=False) == [None, None]
    assert windows("qwen2") == [None, 7]
    assert windows("qwen2", use_sliding_window=False) == [None, None]
    assert windows("qwen2", max_window_layers=0) == [7, 7]
    many = windows("qwen2", max_window_layers=None, num_hidden_layers=30)
    assert many == [None] * 28 + [7] * 2  # 28 is the default of transformers
    kinds = ["sliding_attention", "full_attention"]
    assert windows("qwen2", layer_types=kinds) == [7, None]
    assert windows("qwen3", use_sliding_window=True, max_window_layers=1) == [None, 4096]
    assert windows("qwen3", use_sliding_window=True, sliding_window=None) == [None, None]


def test_the_text_of_models_of_text_and_images() -> None:
    """A flat config, as Qwen2-VL's files have, and one whose text decoder has no family."""
    flat = {
        **tiny_config("qwen2"),
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "vision_config": {"depth": 2},
    }
    model = build_model(text_config(flat), "float32")
    assert model.config == build_model(tiny_config("qwen2"), "float32").config
    assert model.family.optional_prefix[:2] == ("model.language_model.", "language_model.")
    other = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "x"}}
    with pytest.raises(UnknownArchitectureError, match="text decoder of LlavaFor.* is 'x'"):
        text_config(other)


def test_llama4s_chunks() -> None:
    """Layers that rotate attend within chunks, or those that ``layer_types`` names; a context of
    one chunk has none.
    """

    def chunks(length: int | None, **keys: Any) -> list[int | None]:
        config = {**tiny_config("llama4"), "attention_chunk_size": 64, **keys}
        model = build_model(config, "float32", length)
        assert model.config.lengths == (512, 512)
        mixers = [layer.mixer for layer in model.config.layers]
        found = [used_chunk(mixer.chunk) for mixer in mixers if isinstance(mixer, AttentionConfig)]
        return [chunk and chunk.size for chunk in found]

    assert chunks(None) == [64, None]
    assert chunks(64) == [None, None]
    assert chunks(None, attention_chunk_size=None) == [None, None]
    kinds = ["full_attention", "chunked_attention"]
    assert chunks(None, layer_types=kinds) == [None, 64]
    with pytest.raises(ConfigError, match="'chunked_attention', but 'attention_chunk_size' is nu"):
        chunks(None, layer_types=kinds, attention_chunk_size=None)


@pytest.mark.parametrize("name", ["llama4", "phimoe", "deepseek_v32"])
def test_a_sequence_may_be_longer_than_the_context(name: str) -> None:
    """Chunks, ropes and chosen tokens are those of a context of that length."""
    config = {**tiny_config(name), "max_position_embeddings": 512}
    if name == "llama4":
        config["attention_chunk_size"] = 64
    short, long = build_model(config, "float32", 4), build_model(config, "float32", 500)
    assert short.config != long.config
    assert short.for_tokens(500) == long
    assert long.for_tokens(500) is long and short.for_tokens(3) is short


def test_the_rope_of_a_sequence_that_is_longer_than_the_context() -> None:
    config = {**tiny_config("phimoe"), "max_position_embeddings": 512}
    short, long = build_model(config, "float32", 4), build_model(config, "float32", 300)
    tokens, params = jnp.arange(300) % 7, random_params(long)
    assert jnp.array_equal(forward(short, params, tokens), forward(long, params, tokens))


def test_files_that_transformers_saved_with_modules_of_another_architecture() -> None:
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "exaone"}
    saved = {**tiny_config("llama"), **names}
    assert build_model(saved, "float32").family.name == "exaone"
    assert build_model({**saved, "model_type": "llama"}, "float32").family.name == "llama"


@pytest.mark.parametrize(("length", "scale"), [(256, 1.2), (257, 1.3)])
def test_phimoes_factors_of_short_and_long_contexts(length: int, scale: float) -> None:
    rope = build_model(tiny_config("phimoe"), "float32", length).config.ropes[0]
    assert rope.attention_scale == scale


_SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt_oss", {"hidden_act": "gelu"}),
        ("kimi_linear", {"tie_word_embeddings": True}),
        ("xlstm", {"tie_word_embeddings": True}),
        ("bailing_hybrid", {"tie_word_embeddings": True, "linear_head_dim": 16, "head_dim": 8}),
        (
            "nemotron_h",
            {"sliding_window": 16, "attention_bias": True, "tie_word_embeddings": True},
        ),
        ("jetmoe", {"num_attention_heads": 7}),
        ("mpt", {"no_bias": False, "expansion_ratio": 3}),
        ("gpt_neox", {"num_key_value_heads": 2}),
        ("biogpt", {"num_key_value_heads": 2}),
        ("persimmon", {"num_key_value_heads": 2}),
        ("gemma4", {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 8}),
    ],
)
def test_keys_that_transformers_writes_and_does_not_use(name: str, change: dict[str, Any]) -> None:
    """A checkpoint whose tensors do not fit is refused by their names."""
    config = tiny_config(name)
    expected = build_model(config, "float32").config
    assert build_model({**config, **change}, "float32").config == expected


def test_the_base_beside_a_rope_section_is_a_default_that_transformers_writes() -> None:
    section = {"rope_type": "default", "rope_theta": 5e5}
    for name in ("cohere2_moe", "bailing_hybrid"):
        config = {k: v for k, v in tiny_config(name).items() if k != "rope_theta"}
        both = build_model({**config, "rope_parameters": section, "rope_theta": 1e4}, "float32")
        assert both.config == build_model({**config, "rope_parameters": section}, "float32").config
        assert both.config.ropes[0].theta == 5e5


def test_sizes_of_layers_that_a_model_does_not_have() -> None:
    """They are written all the same."""
    dense = {**tiny_config("deepseek_v3"), "first_k_dense_replace": 2, "num_hidden_layers": 2}
    assert not build_model(dense, "float32").config.experts
    whole = {**tiny_config("qwen3_5"), "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    assert build_model(whole, "float32").config.layers[0].mixer.words().startswith("4 query heads")


def test_the_part_of_mimos_heads_that_rotates() -> None:
    """The default of a plain rope; a scaled one has its own key or rotates whole heads."""
    config = {k: v for k, v in tiny_config("mimo_v2_flash").items() if "rotary" not in k}
    parts = {"full_attention": {**_SCALED, "rope_theta": 1e6}, "sliding_attention": {}}
    model = build_model({**config, "rope_parameters": parts}, "float32")
    mixers = [layer.mixer for layer in model.config.layers]
    found = {
        (m.window is None, m.rope.rotary_dim)
        for m in mixers
        if isinstance(m, AttentionConfig) and m.rope is not None
    }
    assert found == {(True, None), (False, 8)}
    with pytest.raises(ConfigError, match="'partial_rotary_factor' is 0.25, .* supports only 0.5"):
        section = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4}
        build_model({**tiny_config("minimax"), "rope_parameters": section}, "float32")


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "llama4"])
@pytest.mark.parametrize(("given", "kind"), [("gelu", "gelu"), ("relu2", "gated_relu2")])
def test_the_activation_of_experts(name: str, given: str, kind: str) -> None:
    """The dense networks of a mixture have the same."""
    config = build_model({**tiny_config(name), "hidden_act": given}, "float32").config
    assert {ffn.activation.kind for ffn in config.experts.values()} == {kind}
    shared = [ffn.shared for ffn in config.experts.values() if ffn.shared is not None]
    networks = [layer.ffn for layer in config.layers if isinstance(layer.ffn, FeedForwardConfig)]
    assert {network.activation for network in (*shared, *networks)} <= {given}
