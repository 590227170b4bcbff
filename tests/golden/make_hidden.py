"""Makes data/hidden/<case>.safetensors: hidden states and attention patterns of transformers.

A tool, run by hand in the environment of ``make_golden.py``, for checkpoints that that one made:

    python make_hidden.py [CASE ...]

Without names all cases are made. Each file holds, for the first sequence of the case: hidden
[layers + 1, T, D], the inputs of the layers and the output of the final norm; patterns
[layers, N, T, T], of the layers that have them: linear attention has none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import nemotron_nas
import torch
from cases import CASES as GOLDEN_CASES
from deepseek import facts_of_qwen2_moe, named_back
from internlm2 import unpacked
from make_golden import FLAT_WITH_IMAGES
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

DATA = Path(__file__).parent / "data"
CASES = (
    "llama_tied",
    "llama_bias_head_dim",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma3",
    "gemma3n_active",
    "gemma4",
    "gemma4_unified",
    "olmo2",
    "phi3",
    "glm",
    "glm4",
    "stablelm",
    "granite",
    "smollm3",
    "gemma2",
    "cohere",
    "cohere2",
    "gemma",
    "seed_oss",
    "ministral",
    "olmo3",
    "cwm",
    "hunyuan",
    "apertus",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "ernie4_5",
    "exaone4",
    "starcoder2",
    "olmo",
    "arcee",
    "helium",
    "nemotron",
    "jais2",
    "gpt_neox",
    "phi",
    "falcon",
    "gptj",
    "opt",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "dory",
    "qwen4_exp",
    "qwen3_next",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "axk2",
    "mistral_large4",
    "kimi_linear",
    "bailing_hybrid",
    "deepseek",
    "dots1",
    "minimax_m2",
    "glm4_moe_lite",
    "exaone_moe",
    "solar_open",
    "afmoe",
    "flex_olmo",
    "cohere2_moe",
    "hy_v3",
    "hy_v4",
    "deepseek_v4",
    "glm5_next",
    "xlstm",
    "mistral4",
    "sarvam_moe",
    "sarvam_mla",
    "youtu",
    "mellum",
    "phimoe",
    "llama4",
    "minicpm3",
    "jetmoe_untied",
    "lfm2",
    "lfm3",
    "flint",
    "doge",
    "granite_hybrid",
    "bamba",
    "falcon_h1_plain",
    "nemotron_h",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "olmo_hybrid",
    "bloom",
    "mpt",
    "internlm2",
    "internlm3",
    "minicpm",
    "orion",
    "nemotron_nas",
    "nanochat",
    "exaone",
    "gpt_bigcode",
    "gpt_neo",
    "codegen",
    "persimmon",
    "vaultgemma",
    "bitnet",
    "hyperclovax",
    "biogpt",
    "xglm",
    "ctrl",
    "minimax",
    "axk1",
    "dbrx",
    "laguna_elements",
    "step3p5_alike",
    "minimax_m3",
    "muse_glimmer",
    "muse_spark",
    "dots3_note",
    "zaya",
    "chameleon_swin",
    "mimo_v2_flash",
    "longcat_flash",
    "diffllama_pair",
    "aria",
    "mllama",
    "paddleocr_vl",
    "deepseek_ocr2",
    "openai_gpt",
    "gpt_neox_japanese",
    "recurrent_gemma",
    "rwkv",
    "modernbert_decoder_biases",
    "ernie4_5_vl",
    "cohere_compass",
    "kolibri1",
    "lara_mini",
    "molmo2",
    "zamba",
    "zamba2",
)

# of which transformers has no class, and computes the same with the keys of another one
AS_OTHERS = ("minicpm", "orion", "nemotron_nas")

# where transformers has the outputs of the layers and not their inputs
AFTER = ("mamba2", "falcon_mamba", "rwkv")


@torch.inference_mode()
def make(name: str) -> None:
    """One file."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if name == "internlm2":  # transformers has no class of it
        facts["attention_bias"] = facts.pop("bias")
    if name == "deepseek":
        facts |= facts_of_qwen2_moe(facts)
    if name in AS_OTHERS:
        model_type, facts = GOLDEN_CASES[name]
        facts = {"model_type": model_type, **facts}
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    is_text = config.get_text_config() is config and config.model_type not in FLAT_WITH_IMAGES
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    weights = {k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weig")}
    if name == "internlm2":
        weights = unpacked(weights, config)
    if name == "deepseek":
        weights = named_back(weights)
    if name == "nemotron_nas":
        model = auto.from_config(config, attn_implementation="eager")
        nemotron_nas.change(model)
        model.load_state_dict(weights)
    else:
        with tempfile.TemporaryDirectory() as folder:  # which stacks the tensors of experts
            config.save_pretrained(folder)
            save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
            model = auto.from_pretrained(folder, attn_implementation="eager")
    model = model.float().eval()
    ids = tensors["token_ids"][:1].long()
    inputs: list[torch.Tensor] = []  # of each layer
    for layer in getattr(getattr(model, "model", None), "layers", ()):
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    out = model(ids, output_hidden_states=True, output_attentions=True)
    patterns = [one for one in getattr(out, "attentions", None) or () if one is not None]
    if model.config.model_type == "deepseek_v4":
        patterns = []  # to entries of windows, too
    square = (ids.shape[1],) * 2  # and no states of lightning attention
    patterns = [one for one in patterns if one.shape[-2:] == square]
    assert (out.logits[0] - tensors["logits"][0]).abs().max() < 1e-4
    hidden, embedded = out.hidden_states, model.get_input_embeddings()(ids)
    if model.config.model_type == "rwkv":
        embedded = model.rwkv.blocks[0].pre_ln(embedded)
    if model.config.model_type == "dory":  # passes begin with a sum, and a layer has several
        hidden = (*inputs, hidden[-1])
    if model.config.model_type in AFTER:
        hidden = (embedded, *hidden[:-2], hidden[-1])
    if hidden[0].ndim == 4:  # several streams, of which the first one, and the final norm
        last = model.model(ids).last_hidden_state
        first = (one[0] if len(one) > 1 else one[:, :, 0] for one in hidden[:-1])
        hidden = (*first, last)
    width = embedded.shape[-1]  # of the first of several adjacent streams
    hidden = [one[..., :width] for one in hidden]
    made = {"hidden": torch.cat(hidden), "patterns": torch.cat(patterns or [torch.zeros(0)])}
    (DATA / "hidden").mkdir(exist_ok=True)
    save_file(made, DATA / "hidden" / f"{name}.safetensors")
    print(name, {key: tuple(value.shape) for key, value in made.items()})


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
