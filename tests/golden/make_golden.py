"""Makes data/<case>.safetensors: what transformers says for tiny random models of every family.

A tool, run by hand in an environment of its own with torch and transformers (5.23 made the files
that are committed); tests read only its output.

    python make_golden.py [CASE ...]

Without names all rows of ``cases.py`` are made. Those of olmo2, phi3, gemma4, glm, glm4, stablelm,
qwen3_5, qwen3_next, kimi_linear, of mixtures of experts and the names that end in _rope, _acts or
_scales came with 5.24.
Each file holds a checkpoint as Hugging Face writes it (tensors under ``weights/``, its config.json
in the metadata) and what the model says in float32: token_ids [2, T], logits [2, T, V], and
greedy_tokens [2, G], which continue token_ids. ``rope.json`` holds inverse frequencies and the
factor on cosine and sine for each rope scaling.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import nemotron_nas
import torch
from cases import CASES, rope_cases
from deepseek import renamed, without_gates
from deepseek_v4 import published_names as names_of_deepseek_v4
from dory import published_names as names_of_dory
from hy_v4 import published_names as names_of_hy_v4
from internlm2 import packed
from minimax_m3 import published_names
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.minimax.modeling_minimax import MiniMaxCache

DATA = Path(__file__).parent / "data"
LENGTH, GENERATED = 24, 8
# transformers computes linear attention in chunks of 64
LENGTHS = {
    "qwen3_5_long": 150,
    "kimi_linear": 80,
    "bailing_hybrid": 70,
    "bamba": 80,
    "mamba2_tied": 80,
    "falcon_mamba": 80,
    "minimax": 80,
    "recurrent_gemma": 80,
    "rwkv": 80,
    "lara_mini": 80,
    "zamba": 72,
    "zamba2": 72,
    # some times index_topk
    **dict.fromkeys(("deepseek_v32", "deepseek_v32_bias"), 40),
    **dict.fromkeys(("glm_moe_dsa", "glm_moe_dsa_groups", "axk2", "axk2_groups"), 40),
    **dict.fromkeys(("minimax_m3", "minimax_m3_text"), 40),
    "deepseek_v4": 40,
    **{"qwen4_exp": 70, "qwen4_exp_plain": 30},
    **{"glm5_next": 80, "glm5_next_shared": 40},
    "xlstm": 80,
    **dict.fromkeys(("mistral_large4", "hy_v4", "hy_v4_groups", "hy_v4_multimodal"), 40),
}
SEEDS = {  # others have 0; norms of small values magnify rounding by luck of the draw
    "qwen3_5": 9,
    "qwen3_5_tied": 8,
    "qwen3_5_multimodal": 3,
    "qwen3_5_moe": 4,
    "qwen3_5_moe_multimodal": 5,
    "qwen3_next": 8,
    "qwen3_next_sparse_step": 8,
    "kimi_linear": 5,
    "bailing_hybrid": 3,
    "gemma4_layer_inputs": 4,
    "gemma4_all": 4,
    "granite_hybrid": 1,
    "falcon_mamba": 28,
    "olmo_hybrid": 1,
    "olmo_hybrid_rope": 1,
    "zamba": 0,
    "zamba_heads": 1,
    "zamba2": 13,
    "deepseek_v32": 8,
    "deepseek_v32_bias": 3,
    "glm5_next": 5,
    "glm5_next_shared": 2,
    "xlstm": 4,
}
FLAT_WITH_IMAGES = ("chameleon",)  # without a config of the text decoder alone
HEADS = ("lm_head.weight", "output_projection.weight", "embed_out.weight", "head.weight")
HEADS += ("decoder.weight",)
FREE_STEPS = (0.0, float("inf"))
# of which single steps round otherwise; so a choice of tokens would differ that rounding decides
RECURRENT = {"linear_attention", "conv", "hybrid", "indexed_attention", "minimax_m3_sparse"}
RECURRENT |= {"compressed_sparse_attention", "heavily_compressed_attention"}
ROUNDING = 3e-5  # what chunks and single steps may differ by; tests allow 1e-4
# norms multiply by 1 + weight
ZERO_CENTRED = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron", "gemma", "gemma2"),
    *("qwen4_exp_text", "vaultgemma", "recurrent_gemma", "step3p5", "minimax_m3_vl_text"),
)
# published files have other names
RENAMED = (
    *("gpt_neox", "gpt_neox_sequential", "nemotron_h", "llava", "qwen2_5_vl", "qwen3_vl"),
    *(
        "gemma3_multimodal",
        "glm4v",
        "mistral4",
        "mistral_large4",
        "exaone",
        "aria",
        "mllama",
        "paddleocr_vl",
    ),
    *("paligemma", "smolvlm", "ernie4_5_vl", "mistral_large4"),
    *("molmo2", "molmo2_after"),
    *("zamba", "zamba2"),  # which have each block once
)
# published files stack the tensors of experts
STACKED = ("qwen3_5_moe_multimodal", "llama4", "llama4_plain", "llama4_chunks")
# keys of config.json that transformers derives from those of published files
DERIVED = {
    "kimi_linear": (
        *("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"),
        *("linear_conv_kernel_dim", "head_dim", "qk_head_dim"),
    ),
    "bailing_hybrid": ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
    "internlm2": ("attention_bias", "mlp_bias", "head_dim"),
    "minicpm": (
        *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
        *("attention_multiplier", "model_type"),
    ),
    "orion": (
        *("layer_norm_eps", "partial_rotary_factor", "use_qkv_bias", "qk_layernorm"),
        *("use_parallel_residual", "model_type"),
    ),
    "nemotron_nas": ("num_key_value_heads", "intermediate_size", "head_dim", "model_type"),
    "deepseek": (
        *("num_experts", "mlp_only_layers", "decoder_sparse_step", "qkv_bias", "layer_types"),
        *("shared_expert_intermediate_size", "use_sliding_window", "sliding_window"),
        *("max_window_layers", "model_type"),
    ),
}
# and those that it overwrites, with the widths of other heads
GIVEN = {
    "bailing_hybrid_kinds": {"head_dim": 16},
    "internlm2": {"bias": True},
    "mimo": {"model_type": "mimo", "attention_bias": True},
    "minicpm": {
        **{"model_type": "minicpm", "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 8},
    },
    "orion": {"model_type": "orion", "rms_norm_eps": 1e-3},
    "nemotron_nas": {"model_type": "nemotron-nas", "block_configs": nemotron_nas.BLOCKS},
    # transformers' modules of text alone rotate halves, whatever published files need
    **dict.fromkeys(("hy_v4", "hy_v4_groups"), {"rope_interleave": False}),
    "deepseek": {
        **{"model_type": "deepseek", "scoring_func": "softmax", "moe_layer_freq": 1},
        **{"n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1},
    },
}
# Architectures of published files, for which transformers has the modules of another one.
ARCHITECTURES = {
    "sarvam_moe": "SarvamMoEForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "mimo": "MiMoForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "orion": "OrionForCausalLM",
    "nemotron_nas": "DeciLMForCausalLM",
    "exaone": "ExaoneForCausalLM",
}
# Eager attention adds ALiBi of Falcon twice: to the mask, and to the scores.
IMPLEMENTATIONS = {"falcon_alibi": "sdpa"}
SOFT = re.compile("shared_transf.*(q_proj|k_proj|_adapter_list)")
DORY = ("sqk", "s_gate", "lambda_1", "lambda_2", "logit_scale")
POSITIONS, LONG = 131072, 400_000


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part of the model shows in the logits."""
    zero_centred = model.config.get_text_config().model_type in ZERO_CENTRED
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            noise = noise - 2.0  # slow enough that a state is felt over several chunks
        elif ".rg_lru." in name:  # 1 - decay ** 2 of a decay near 1 is rounded
            noise = 0.2 * noise
        elif name.endswith(("states_scale", "residual_scale", "states_bias", "residual_bias")):
            noise = 0.1 * noise + name.endswith("scale")  # of ZAYA's stream
        elif ".router_mlp.fc" in name and tensor.ndim == 2:  # so that choices differ
            noise = noise * 4 / tensor.shape[-1] ** 0.5
        elif "x_proj_weight" in name:  # of Zamba, whose states grow otherwise
            noise = noise * 0.2 / tensor.shape[-1] ** 0.5
        elif SOFT.search(name):  # of scores that rounding does not decide
            noise = noise * 0.75 / tensor.shape[-1] ** 0.5
        elif name.endswith(DORY):  # factors near 1, and rates near 0.4 of either sign
            own = 1 + 0.2 * noise if not name.endswith(("lambda_1", "lambda_2")) else 8 * noise
            own = 4 * own if name.endswith("logit_scale") else own
            noise = own * model.config.initializer_range
        elif tensor.ndim >= 2 and not name.endswith("bias"):  # of experts 3
            noise = noise * 1.5 / tensor.shape[-1] ** 0.5
        elif "norm" in name or "ln_" in name:
            around_zero = zero_centred and not name.endswith("linear_attn.norm.weight")
            noise = noise * 0.2 + (0.0 if name.endswith("bias") or around_zero else 1.0)
        else:
            noise = noise * 0.5
        tensor.data.copy_(noise)
    for name, tensor in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.data.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
        if name.endswith("balancing_biases"):  # transformers sets the last when it loads a file
            tensor.data.copy_(0.02 * torch.randn(tensor.shape, generator=generator) - 1.0)
            tensor.data[-1] = -1.0
        if name.endswith("tid2eid"):  # distinct experts of each token
            count = model.config.n_routed_experts
            drawn = torch.rand((len(tensor), count), generator=generator)
            tensor.data.copy_(drawn.argsort(1)[:, : tensor.shape[1]])
        if name.endswith("layer_scalar"):
            tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        if name.endswith(("act_fn.beta", "act_fn.eps")):
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator))


def published(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors as files have them: those of experts are mostly stacked only in memory."""
    if name.startswith("olmo_hybrid"):
        return _olmo_hybrid(model)
    if name == "internlm2":
        return packed(model.state_dict(), model.config)
    if name == "minimax_m3_text":
        return published_names(model.state_dict())
    if name.startswith("cosmos3_edge"):
        names = {".mlp.fc1.": ".mlp.up_proj.", ".mlp.fc2.": ".mlp.down_proj."}
        found = {k: t for k, t in model.state_dict().items() if ".visual." not in k}
        return {re.sub(r"\.mlp\.fc[12]\.", lambda m: names[m[0]], k): t for k, t in found.items()}
    if name.startswith("dory"):
        return names_of_dory(model.state_dict())
    if name.startswith("hy_v4"):
        return names_of_hy_v4(model.state_dict())
    if name.startswith("deepseek_v4"):
        return names_of_deepseek_v4(model.state_dict())
    as_published = any(".experts." in key for key in model.state_dict()) or name in RENAMED
    if name in STACKED or not as_published:
        return model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    # Kimi Linear's dense layers, which transformers saves under the name of those with experts
    made = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", n): t for n, t in tensors.items()}
    return renamed(made) if name == "deepseek" else made


def _olmo_hybrid(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """OLMo Hybrid's, of which transformers saves convolutions in three equal parts."""
    made: dict[str, torch.Tensor] = {}
    config, tensors = model.config, model.state_dict()
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    names = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }
    for key, tensor in tensors.items():
        start, _, end = key.rpartition("conv1d.weight")
        if not end and start:
            parts = zip("qkv", tensor.split([keys, keys, values]), strict=True)
            made |= {f"{start}{part}_conv1d.weight": own for part, own in parts}
            continue
        layer = re.match(r"model\.layers\.\d+\.", key)
        linear = layer is not None and f"{layer[0]}input_layernorm.weight" in tensors
        for one, other in names.items() if linear else ():
            key = key.replace(one, other)
        made[key] = tensor
    return made


def stepwise_logits(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits [N, T, V] of one token a step with a cache, the recurrent form of linear attention."""
    cache, steps = DynamicCache(config=model.config.get_text_config()), []
    if model.config.model_type == "minimax":
        cache = MiniMaxCache()
    for at, token in enumerate(token_ids.split(1, dim=1)):
        # MiniMax's cache counts the keys of the first layer, which may have none
        place = torch.full_like(token, at)
        made = model(token, cache=cache, use_cache=True, position_ids=place)
        steps.append(made.logits)
    return torch.cat(steps, dim=1)


@torch.inference_mode()
def make(name: str, config: PreTrainedConfig) -> None:
    """One file."""
    torch.manual_seed(0)
    text = config.get_text_config()
    is_text = text is config and config.model_type not in FLAT_WITH_IMAGES
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    attention = IMPLEMENTATIONS.get(name, "eager")
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    if name == "nemotron_nas":
        nemotron_nas.change(model)
    generator = torch.Generator().manual_seed(SEEDS.get(name, 0))
    with torch.no_grad():
        randomise(model, generator)
        if name == "deepseek":
            without_gates(model)
    length = LENGTHS.get(name, LENGTH)
    token_ids = torch.randint(0, text.vocab_size, (2, length), generator=generator)
    logits = model(token_ids).logits
    kinds = getattr(text, "layer_types", None) or ()
    # single tokens of transformers' Mamba-2 ignore these limits
    limited = getattr(text, "time_step_limit", FREE_STEPS) != FREE_STEPS
    limited |= text.model_type in ("nemotron_h", "zamba2")  # by time_step_min
    limited |= text.model_type == "recurrent_gemma"  # whose modules keep the last call's states
    if RECURRENT.intersection(kinds) and not limited:
        difference = (stepwise_logits(model, token_ids) - logits).abs().max()
        assert difference < ROUNDING, f"{name}: chunks and single steps differ by {difference:.1e}"
    sequence = token_ids
    for _ in range(GENERATED):
        best = model(sequence).logits[:, -1].argmax(-1, keepdim=True)
        sequence = torch.cat([sequence, best], dim=1)
    tied = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    weights = {
        f"weights/{key}": tensor.contiguous()
        for key, tensor in published(name, model).items()
        if not (tied and key in HEADS)
    }
    outputs = {
        "token_ids": token_ids.int(),
        "logits": logits,
        "greedy_tokens": sequence[:, length:].int().contiguous(),
    }
    architecture = ARCHITECTURES.get(name, type(model).__name__)
    facts = {**config.to_dict(), "architectures": [architecture]}
    for key in DERIVED.get(name, ()):
        facts.pop(key, None)
    facts |= GIVEN.get(name, {})
    metadata = {"config": json.dumps(facts, sort_keys=True)}
    save_file({**weights, **outputs}, DATA / f"{name}.safetensors", metadata)
    print(name, f"{logits.std():.2f}", (DATA / f"{name}.safetensors").stat().st_size)


def make_rope() -> None:
    """rope.json."""
    out = {}
    for name, section in rope_cases().items():
        length = LONG if name.endswith("_long") else None
        config = LlamaConfig(
            head_dim=128, max_position_embeddings=POSITIONS, rope_parameters={**section}
        )
        init = ROPE_INIT_FUNCTIONS[section["rope_type"]]
        frequencies, scale = init(config, seq_len=length)
        out[name] = {
            "rope_parameters": section,
            "max_position_embeddings": POSITIONS,
            "length": length,
            "head_dim": 128,
            "inverse_frequencies": frequencies.tolist(),
            "attention_scale": scale,
        }
    (DATA / "rope.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    for case, (model_type, keys) in CASES.items():
        if not sys.argv[1:] or case in sys.argv[1:]:
            make(case, CONFIG_MAPPING[model_type](**keys))
    make_rope()
