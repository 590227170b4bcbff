"""A key of config.json that changes the result is supported, or refused by name."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import Model, build_model
from jaxinfer.models.hf_keys import NEUTRAL, NO_EFFECT
from kit.config_changes import changes
from kit.tiny_models import NAMES, tiny_config

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())

READ = json.loads((Path(__file__).parents[1] / "data" / "configs_read.json").read_text())

# Keys of other families, with a value that would change the result.
CHANGES: dict[str, Any] = {
    "rope_ratio": 2.0,
    "rotary_emb_base": 500000,
    "mrope_section": [1, 1, 2],
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "position_embedding_type": "alibi",
    "alibi": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_multiplier": 0.0078125,
    "query_pre_attn_scalar": 256,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "clip_qkv": 8.0,
    "norm_after_ffn": True,
    "layer_norm_eps": 1e-5,
    "attention_chunk_size": 8192,
    "attention_sinks": True,
    "window_size": 128,
    "sliding_window_pattern": 6,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "num_local_experts": 8,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "use_bias": True,
    "o_bias": True,
    "mlp_activation": "relu",
    "is_causal": False,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "per_layer_config": {"0": {"intermediate_size": 8}},
    "dual_chunk_attention_config": {"chunk_size": 262144},
    "pruned_heads": {"0": [1]},
}


_COUNTS = {"num_experts", "num_local_experts"}
_FACTORS = {
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier"),
    "logits_scaling",
}
_CAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
READ_BY = {
    "gemma3": {"final_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern"},
    "gemma3n": {"final_logit_softcapping", "query_pre_attn_scalar"},
    "gemma4": {"final_logit_softcapping", "num_experts", "moe_intermediate_size"},
    "gemma4_all": {"final_logit_softcapping", "num_experts", "moe_intermediate_size"},
    "gemma4_unified": {"final_logit_softcapping"},
    "qwen3_moe": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "qwen3_5_moe": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "qwen4_exp": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "qwen3_next": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "mixtral": _COUNTS,
    "gpt_oss": _COUNTS,
    "stablelm": {"layer_norm_eps", "qk_layernorm"},
    "cohere": {"layer_norm_eps", "logit_scale", "use_qk_norm"},
    "cohere2": {"layer_norm_eps", "logit_scale", "sliding_window_pattern"},
    "hunyuan": {"use_qk_norm"},
    "hunyuan_moe": {*_COUNTS, "moe_intermediate_size", "use_qk_norm"},
    "qwen2_moe": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "olmoe": {*_COUNTS, "clip_qkv"},
    "glm4_moe": {"moe_intermediate_size", "use_qk_norm", "num_local_experts"},
    "exaone4": {"sliding_window_pattern"},
    "starcoder2": {"use_bias"},
    "olmo": {"clip_qkv"},
    "jais2": {"layer_norm_eps"},
    "phi": {"layer_norm_eps", "qk_layernorm"},
    "gpt_neox": {"layer_norm_eps", "rotary_emb_base", "rotary_pct"},
    "granite": _FACTORS,
    "granite_moe": {*_FACTORS, "num_local_experts"},
    "gemma2": {*_CAPS, "query_pre_attn_scalar"},
    "ernie4_5": {"use_bias"},
    "ernie4_5_moe": {"use_bias", "moe_intermediate_size", "num_local_experts"},
    "deepseek_v2": {"moe_intermediate_size"},
    "deepseek_v3": {"moe_intermediate_size"},
    "kimi_linear": {*_COUNTS, "moe_intermediate_size"},
    "bailing_hybrid": {*_COUNTS, "moe_intermediate_size"},
    "deepseek": {"moe_intermediate_size", "num_local_experts"},
    "dots1": {"moe_intermediate_size", "num_local_experts"},
    "minimax_m2": {*_COUNTS, "use_qk_norm"},
    "minimax_m3": {*_COUNTS, "use_qk_norm"},
    "deepseek_v32": {"moe_intermediate_size", "num_local_experts"},
    "glm_moe_dsa": {"moe_intermediate_size", "num_local_experts"},
    "axk2": {"moe_intermediate_size", "num_local_experts"},
    "mistral_large4": {*("moe_intermediate_size", "num_local_experts", "final_logit_softcapping")},
    "hy_v4": {"moe_intermediate_size", "num_local_experts"},
    "deepseek_v4": {"moe_intermediate_size", "num_local_experts"},
    "glm5_next": {"moe_intermediate_size", "num_local_experts"},
    "glm4_moe_lite": {"moe_intermediate_size", "num_local_experts"},
    "exaone_moe": {*_COUNTS, "moe_intermediate_size", "sliding_window_pattern"},
    "solar_open": {"moe_intermediate_size", "num_local_experts"},
    "afmoe": {*_COUNTS, "moe_intermediate_size"},
    "flex_olmo": _COUNTS,
    "cohere2_moe": {*_COUNTS, "layer_norm_eps", "logit_scale", "sliding_window_pattern"},
    "hy_v3": {*_COUNTS, "moe_intermediate_size"},
    "granite_moe_shared": {*_FACTORS, "num_local_experts"},
    "mistral4": {"moe_intermediate_size", "num_local_experts"},
    "sarvam_moe": {*_COUNTS, "moe_intermediate_size", "use_qk_norm", "use_bias"},
    "sarvam_mla": {*_COUNTS, "moe_intermediate_size"},
    "mellum": {*_COUNTS, "moe_intermediate_size"},
    "phimoe": {"num_local_experts"},
    "jetmoe": {"num_local_experts"},
    "llama4": {"num_local_experts", "use_qk_norm", "attention_chunk_size"},
    "lfm2_moe": {*_COUNTS, "moe_intermediate_size"},
    "granite_hybrid": {*_FACTORS, "num_local_experts"},
    "falcon_h1": {"embedding_multiplier"},
    "nemotron_h": {"use_bias", "moe_intermediate_size", "num_local_experts"},
    "mamba2": {"use_bias"},
    "falcon_mamba": {"use_bias"},
    "jamba": _COUNTS,
    **{name: {"alibi"} for name in ("falcon", "falcon_7b", "falcon_alibi")},
    "stablelm_12b": {"layer_norm_eps", "qk_layernorm"},
    "persimmon": {"layer_norm_eps", "qk_layernorm"},
    "biogpt": {"layer_norm_eps"},
    "gpt_neo": {"window_size"},
    "nanochat": {"final_logit_softcapping"},
    "vaultgemma": {*_CAPS, "query_pre_attn_scalar"},
    "hyperclovax": _FACTORS,
    "granite_swa": _FACTORS,
    "granite_moe_swa": {*_FACTORS, "num_local_experts"},
    "flint": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "minimax": {"num_local_experts"},
    "axk1": {"moe_intermediate_size", "num_local_experts"},
    "laguna": {*_COUNTS, "moe_intermediate_size"},
    "zaya": {"moe_intermediate_size", *_COUNTS},
    "dots3_note": {"moe_intermediate_size", "num_local_experts", "per_layer_config"},
    "muse_spark": {
        *("final_logit_softcapping", "num_local_experts", "moe_intermediate_size"),
    },
    "muse_glimmer": {"final_logit_softcapping"},
    "step3p5": {
        *("moe_intermediate_size", "num_local_experts", "use_qk_norm", "query_pre_attn_scalar"),
    },
    "doge": {"num_experts"},  # of its mixtures, which "is_moe" tells apart
    "nemotron_h_experts": {"use_bias", "moe_intermediate_size", "num_local_experts"},
    "mimo_v2_flash": {"moe_intermediate_size", "num_local_experts", "attention_chunk_size"},
    "longcat_flash": {"num_local_experts"},
    "longcat_flash_ngram": {"num_local_experts"},
    "paddleocr_vl": {"use_bias"},
    "cohere_compass": {"layer_norm_eps", "logit_scale"},
    "ernie4_5_vl": {"use_bias", "moe_intermediate_size", "num_local_experts"},
    "modernbert_decoder": {"layer_norm_eps", "position_embedding_type"},
    "deepseek_ocr2": {"moe_intermediate_size", "num_local_experts"},
    "aria": {"num_local_experts"},
    "gpt_neox_japanese": {"layer_norm_eps", "rotary_emb_base", "rotary_pct"},
    "kolibri1": {*_COUNTS, "moe_intermediate_size"},
    "lara_mini": {*_COUNTS, "moe_intermediate_size"},
    "bailing": {*_COUNTS, "moe_intermediate_size", "use_bias"},
    "bailing_v2": {*_COUNTS, "moe_intermediate_size", "use_bias", "use_qk_norm"},
    "bailing_linear": {*_COUNTS, "moe_intermediate_size", "use_bias", "use_qk_norm"},
    "bailing_v2_5": {*_COUNTS, "moe_intermediate_size", "use_bias", "use_qk_norm"},
    "chatglm": {"rope_ratio"},
    "rnj1": {"final_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern"},
    "mistral_large3": {"moe_intermediate_size", "num_local_experts"},
    "nemotron_h_puzzle": {"use_bias", "moe_intermediate_size", "num_local_experts"},
    "solar": {"logit_scale"},
    "step3": {"moe_intermediate_size", "num_local_experts"},
    "openpangu_ultra": {"moe_intermediate_size", "num_local_experts"},
    "k2_horizon": {*_COUNTS, "moe_intermediate_size", "mlp_only_layers"},
    "openpangu_pro": {"moe_intermediate_size", "num_local_experts"},
    "plamo3": {"sliding_window_pattern", "window_size"},
    "param2moe": {*_COUNTS, "moe_intermediate_size", "use_bias", "use_qk_norm"},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_no_family_reads_is_refused(name: str) -> None:
    config = tiny_config(name)
    for key in CHANGES.keys() - READ_BY.get(name, set()):
        with pytest.raises(ConfigError, match=f"config key '{key}' is .*; (remove|quant|layers)"):
            build_model({**config, key: CHANGES[key]}, "float32")


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_change_nothing(name: str) -> None:
    """They are listed, switched off, or have no word that matters."""
    config = tiny_config(name)
    expected = build_model(config, "float32")
    for key in NO_EFFECT - config.keys() - {"max_window_layers"}:
        assert build_model({**config, key: "anything"}, "float32") == expected, key
    for key in CHANGES.keys() - {"is_causal"} - READ_BY.get(name, set()):
        assert build_model({**config, key: None}, "float32") == expected, key
    own = READ_BY.get(name, set())
    neutral = {key: values[0] for key, values in NEUTRAL.items() if key not in own}
    off = {"use_qk_norm": False, "alibi": False, "mlp_only_layers": [], "quantization_config": {}}
    off = {key: value for key, value in off.items() if key not in own}
    read_from = {"quantization_config": {"quant_method": "gguf", "dequantize": False}}
    assert build_model({**config, **read_from}, "float32") == expected
    other = {"properties": 1, "num_steps": 3, "lora_alpha": 16, "rope_interleaved": False}
    assert build_model({**config, **neutral, **off, **other}, "float32") == expected


@pytest.mark.parametrize("name", PUBLISHED | READ)
def test_published_configs_are_accepted(name: str) -> None:
    config = (PUBLISHED | READ)[name]
    keys = ("max_position_embeddings", "n_positions", "model_max_length", "seq_length")
    positions = next(config[key] for key in keys if key in config)
    default = config.get("original_max_position_embeddings") or positions  # of LongRoPE
    assert build_model(config, "bfloat16").config.lengths == (default, positions)


def in_new_style(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 5 saves it, and with the old keys next to the new one."""
    old = {key: config[key] for key in ("rope_theta", "rope_scaling") if key in config}
    section = {"rope_type": "default", **(old.get("rope_scaling") or {})}
    section["rope_type"] = section.pop("type", section["rope_type"])
    section["rope_theta"] = old["rope_theta"]
    return {**config, "rope_parameters": section}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, config in PUBLISHED.items()
        if "rope_theta" in config and not config.get("mla_use_nope")  # where nothing rotates
    ],
)
def test_old_and_new_spelling_of_rope_may_be_together(name: str) -> None:
    config = PUBLISHED[name]
    both, expected = in_new_style(config), build_model(config, "bfloat16")
    new = {key: both[key] for key in both if key not in ("rope_theta", "rope_scaling")}
    half = {key: both[key] for key in both if key != "rope_scaling"}  # as merged checkpoints have
    assert [build_model(one, "bfloat16") for one in (both, new, half)] == [expected] * 3
    theta = both["rope_theta"]
    with pytest.raises(ConfigError, match=f"'rope_theta' is {theta + 1}, and .* is {theta}; make"):
        build_model({**half, "rope_theta": theta + 1}, "bfloat16")


def test_gemmas_ropes_in_both_spellings() -> None:
    config = {key: value for key, value in tiny_config("gemma3").items() if "rope" not in key}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    full = {"rope_type": "default", "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    models = [build_model({**config, **keys}, "float32") for keys in (old, new, {**old, **new})]
    assert models == [models[0]] * 3
    with pytest.raises(ConfigError, match="'rope_local_base_freq' is 2.0, and .* is 10000.0; make"):
        build_model({**config, **new, "rope_local_base_freq": 2.0}, "float32")
    with pytest.raises(ConfigError, match="'rope_theta' is 2.0, and .* is 1000000.0; make"):
        build_model({**config, **new, "rope_theta": 2.0}, "float32")


def test_qwens_recipe_for_long_contexts() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**PUBLISHED["qwen3-4b"], "rope_scaling": scaling}
    assert build_model(config, "bfloat16").config.lengths == (131072, 131072)


def test_gpt2_under_the_common_names() -> None:
    config = tiny_config("gpt2")
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    common = {names.get(key, key): value for key, value in config.items()}
    assert build_model(common, "float32") == build_model(config, "float32")


@pytest.mark.parametrize("spelling", ["silu", "swish"])
def test_one_activation_has_several_names(spelling: str) -> None:
    config = tiny_config("qwen3")
    named = build_model({**config, "hidden_act": spelling}, "float32")
    assert named == build_model(config, "float32")


# ---- each key of each family, next to what transformers computes (tests/golden)

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
KEYS: dict[str, dict[str, list[str]]] = json.loads(
    gzip.decompress((GOLDEN / "config_keys.json.gz").read_bytes())
)
NAMED = re.compile("(config|rope) key|rope (type|section|scaling)|experts")
# A length that only the rope section has counts here; transformers takes its default for Phi-3.
OF_SECTION = {("phi3_long_rope", "original_max_position_embeddings missing")}
# transformers 5.24 does not read the base in DBRX's "attn_config", which published files have
_ROPE = (
    *("rope_parameters missing", "rope_parameters=None", "rope_parameters={}"),
    "rope_parameters.rope_theta missing",
)
OF_SECTION |= {("dbrx", name) for name in _ROPE}
# another order of the same sums: of GPT-2, and of state space models (7e-6 of logits of 5)
ROUNDING = {"reorder_and_upcast_attn=True", "chunk_size=2", "mamba_chunk_size=2"}
# and of lightning attention, whose chunks have buffers of their size
ROUNDING |= {f"block_size{change}" for change in (" missing", "=33", "=64", "=2")}
# and of RWKV, whose stream may be halved: an epsilon is then larger
ROUNDING |= {"rescale_every=2"}
# sizes of Chameleon's encoder of images, which is not read
OF_IMAGES = "vq_config"
# Angles at the default's bounds are those of the sequences here.
# So are the chunks of Llama 4.
NOT_FELT = re.compile(r"rope_parameters\.(beta_fast|truncate) missing|attention_chunk_size missing")
# Keys without which this library computes as published weights need it: see models/hy_v4.py.
OWN_DEFAULTS = {("hy_v4", "rope_interleave missing")}


def golden_config(case: str) -> dict[str, Any]:
    """The config.json of a golden file, which has every key that transformers knows."""
    with safe_open(GOLDEN / f"{case}.safetensors", "numpy") as file:
        return json.loads(file.metadata()["config"])


def shapes(model: Model) -> list[tuple[str, tuple[int, ...]]]:
    return [(source.name, source.shape) for spec in model.param_specs for source in spec.sources]


def is_plain(config: dict[str, Any], name: str) -> bool:
    """True for a key that is missing, and for the null of one that is true or false."""
    key = name.removesuffix("=None")
    return name.endswith(" missing") or (key != name and isinstance(config.get(key), bool))


@pytest.mark.parametrize("case", KEYS)
def test_a_changed_key_is_honoured_or_refused(case: str) -> None:
    """No change that has an effect in transformers is ignored; a missing key has the default of
    transformers, unless files would need tensors of other shapes, and the null of a flag is what it
    is in transformers; a refusal names a key.
    """
    config = golden_config(case)
    plain = build_model(config, "float32")
    changed, refused = (set(KEYS[case][kind]) for kind in ("changed", "refused"))
    names = set()
    for name, own in changes(config):
        names.add(name)
        try:
            model = build_model(own, "float32")
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, name
            assert NAMED.search(str(error)), name
            continue
        if name.startswith(OF_IMAGES):
            continue
        if name in changed - ROUNDING and (case, name) not in OF_SECTION:
            assert model != plain, f"{name} changes what transformers computes"
        elif name in refused or not is_plain(config, name) or NOT_FELT.fullmatch(name):
            continue  # others may change sizes that a short sequence does not feel
        elif (case, name) in OWN_DEFAULTS:
            assert model.config != plain.config
        elif shapes(model) == shapes(plain):
            lengths = replace(model.config, lengths=plain.config.lengths)
            assert lengths == plain.config, f"{name} changes nothing in transformers"
    assert names >= changed | refused, "make_config_keys.py was run with other changes"


def test_each_family_has_keys_of_a_golden_file() -> None:
    """Of models of text; a mixture in a family of dense models is a case of its own."""
    files = [path.stem for path in GOLDEN.glob("*.safetensors")]
    found = {golden_config(case)["model_type"] for case in KEYS}
    metadata = [safe_open(GOLDEN / f"{name}.safetensors", "numpy").metadata() for name in files]
    configs = [json.loads(one["config"]) for one in metadata if one and "config" in one]
    kinds = {c["model_type"] for c in configs if "text_config" not in c}
    # which transformers does not have
    assert found == kinds - {"deepseek", "mimo", "minicpm", "orion", "nemotron-nas"}


@pytest.mark.parametrize(
    ("name", "key", "default"),
    [
        ("deepseek_v3", "routed_scaling_factor", 2.5),
        ("deepseek_v3", "n_group", 8),
        ("deepseek_v3", "topk_group", 4),
        ("kimi_linear", "routed_scaling_factor", 2.446),
        ("phi3_long", "original_max_position_embeddings", 4096),
        ("cohere", "rope_theta", 5e5),
        ("cohere2", "rope_theta", 1e4),
        ("helium", "rope_theta", 1e5),
        ("mixtral", "rope_theta", 1e6),
    ],
)
def test_a_missing_key_has_the_default_of_transformers(name: str, key: str, default: Any) -> None:
    config = tiny_config(name.removesuffix("_long"))
    if name == "phi3_long":
        factors = {"long_factor": [2.0] * 6, "short_factor": [1.0] * 6}
        config |= {"rope_scaling": {"type": "longrope", **factors}}
    if name == "deepseek_v3":
        config |= {"n_routed_experts": 16, "n_group": 8, "topk_group": 4}
    config.pop(key, None)
    assert build_model(config, "float32") == build_model({**config, key: default}, "float32")


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
ROPES: dict[str, dict[str, Any]] = {
    "apertus": {**LLAMA3, "rope_theta": 12e6, "factor": 8.0},
    "cwm": {**LLAMA3, "rope_theta": 1e6, "factor": 16.0},
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_a_missing_rope_section_is_the_one_of_transformers(name: str) -> None:
    config = {key: value for key, value in tiny_config(name).items() if "rope" not in key}
    given = build_model({**config, "rope_parameters": ROPES[name]}, "float32")
    assert build_model(config, "float32") == given
    assert build_model({**config, "rope_scaling": None}, "float32") == given
    assert build_model({**config, "rope_theta": ROPES[name]["rope_theta"]}, "float32") == given
    with pytest.raises(ConfigError, match="'rope_theta' is 5.0, and 'rope_theta' of the rope sec"):
        build_model({**config, "rope_theta": 5.0}, "float32")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hunyuan", {"rope_scaling": {"alpha": 3.0}}, "'rope_type' is 'default', and this family"),
        (
            "hunyuan",
            {"rope_scaling": {"type": "dynamic", "alpha": 1e38}, "head_dim": 4},
            "'alpha' is 1e\\+38, which gives heads of 4 components no finite base",
        ),
        (
            "hunyuan",
            {"rope_scaling": {"type": "dynamic", "alpha": 2.0}, "head_dim": 2},
            "'alpha' is 2.0, which gives heads of 2 components no finite base",
        ),
    ],
)
def test_values_that_transformers_does_not_compute_so(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model({**tiny_config(name), **change}, "float32")
