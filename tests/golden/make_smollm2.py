"""Makes data/smollm2_greedy.safetensors: what transformers answers on the default model's weights.

A tool, run by hand in an environment of its own with torch, transformers and gguf; tests read only
its output. SmolLM2-135M-Instruct's Q4_1 GGUF is dequantised by transformers to float32 and decoded
greedily on the CPU past any end-of-sequence token, for 30 prompts: once all together with a KV
cache, then each alone without one. Both must agree; the numbers are those of the second run.

    python make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf TOKENIZER_FOLDER

Tensors (30 prompts, 64 steps): prompt_lens [30]; prompt_tokens [sum of lens], one after another;
decode_tokens [30, 64]; runner_up [30, 64], the second most likely token; margin [30, 64], by how
much logits of the first exceed those of the second; topk_steps [3], the steps whose top 20 are kept
in topk_ids and topk_logprobs [30, 3, 20]. TOKENIZER_FOLDER holds the tokenizer.json that
reproduces llama.cpp's tokenisation (transformers' own conversion of the GGUF does not).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

STEPS = 64
TOPK_STEPS = (0, 13, 63)

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three names for a cat.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "How do I boil an egg?",
    "List the planets of the solar system.",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that reverses a string.",
    "Summarise: The train was late because snow had blocked the line, "
    "so the meeting began at noon.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a robot that learns to paint.",
    "Correct the grammar: 'She don't like apples.'",
    "¿Cuál es la capital de España?",
)

TEXTS = (
    "Once upon a time",
    "The quick brown fox jumps over the lazy",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at 100 degrees Celsius because",
    "import numpy as np\n\nx = np.zeros((3, 4))\nprint(x.",
    "In 1969, two astronauts walked on the Moon. Their names were",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    '{"name": "Alice", "age": 30, "city": "',
    "Les oiseaux chantent dans le jardin et",
    "Q: How many legs does a spider have?\nA: Eight.\n\nQ: How many legs does an ant have?\nA:",
    "| country | capital |\n|---|---|\n| Italy | Rome |\n| Japan | Tokyo |\n| Egypt |",
)

LONG_SENTENCES = (
    "The harbour was quiet in the early morning.",
    "Fishing boats lay side by side along the stone pier, their ropes stiff with salt.",
    "A woman in a yellow coat walked slowly past the closed shops, carrying a basket of bread.",
    "Far out, beyond the lighthouse, a line of grey cloud promised rain before noon.",
    "The old clock over the market hall struck seven, "
    "though everybody knew it was ten minutes slow.",
    "Two boys were trying to repair a kite with tape and a broken ruler.",
    "Nobody had seen the ferry since Tuesday, and the post had not come either.",
    "In the bakery, the radio repeated the forecast: wind from the west, waves of three metres.",
)


def prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """15 chats, 12 short texts, 3 long ones of about 100, 200 and 300 tokens."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS
    ]
    long = " ".join(LONG_SENTENCES * 3)
    ids = tokenizer.encode(long, add_special_tokens=False)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    return [*chats, *texts, ids[:97], ids[:208], ids[:300]]


@torch.inference_mode()
def decode(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:  # [30, 64]
    """64 greedy steps of all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens, cache = [], None
    for _ in range(STEPS):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    return torch.cat(tokens, dim=1)


@torch.inference_mode()
def measure(model: torch.nn.Module, prompt: list[int], tokens: torch.Tensor) -> dict[str, Any]:
    """One sequence run whole and alone: it must choose the same tokens; margins and top 20."""
    whole = torch.tensor([prompt + tokens.tolist()[:-1]])
    logits = model(input_ids=whole, use_cache=False, logits_to_keep=STEPS).logits[0]
    best = torch.topk(logits, 2)
    if not torch.equal(best.indices[:, 0], tokens):
        raise SystemExit("batched and single runs of transformers disagree; change the prompt")
    top = torch.topk(torch.log_softmax(logits[list(TOPK_STEPS)], -1), 20)
    return {
        "decode_tokens": tokens.int(),
        "runner_up": best.indices[:, 1].int(),
        "margin": best.values[:, 0] - best.values[:, 1],
        "topk_ids": top.indices.int(),
        "topk_logprobs": top.values,
    }


def main(gguf: Path, tokenizer_folder: Path) -> None:
    """Decode every prompt, print the texts for a human to judge, save."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    ids = prompts(tokenizer)
    rows = []
    for i, (prompt, tokens) in enumerate(zip(ids, decode(model, ids), strict=True)):
        rows.append(measure(model, prompt, tokens))
        text = tokenizer.decode(tokens)
        print(i, len(prompt), f"{rows[-1]['margin'].min():.2e}", repr(text[:90]), flush=True)
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    tensors["prompt_lens"] = torch.tensor([len(p) for p in ids], dtype=torch.int32)
    tensors["prompt_tokens"] = torch.tensor([t for p in ids for t in p], dtype=torch.int32)
    tensors["topk_steps"] = torch.tensor(TOPK_STEPS, dtype=torch.int32)
    save_file(tensors, Path(__file__).parent / "data" / "smollm2_greedy.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
