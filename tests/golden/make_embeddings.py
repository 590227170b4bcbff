"""Makes data/embeddings.safetensors and data/reranker.safetensors: vectors and scores of
transformers for tiny random models in the form of Qwen3-Embedding and Qwen3-Reranker.

A tool, run by hand in the environment of ``make_golden.py``:

    python make_embeddings.py

Each file holds the tensors as transformers saves them (under ``weights/``), and in its metadata
config.json and tokenizer.json. The tokenizer has a token for each byte; after each text that of
embeddings adds its last special token, as Qwen3-Embedding's does. ``embeddings`` has the texts in
its metadata and last, mean, cls [texts, D], not normalised. ``reranker`` has the query and the
documents, the prompts and the probability of "yes" among "yes" and "no" after each.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM, Qwen3Model

DATA = Path(__file__).parent / "data"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("yes", "no")  # tokens of their own, as in Qwen's vocabulary
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
TEXTS = (
    "What is the capital of China?",
    "Gravity attracts bodies towards each other: masses bend space, and bodies follow.",
    "a",
    "Ünïcödé, 北京 und 🙂",
)
QUERY = "What is the capital of China?"
DOCUMENTS = ("The capital of China is Beijing.", "Gravity is a force.", "北京")
# of Qwen3-Reranker's model card
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def tokenizer(*, ends: bool) -> PreTrainedTokenizerFast:
    """Bytes, ``WORDS`` by merges, and special tokens; ``ends``: one of those ends each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)}
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    for one, other in merges:
        vocab[one + other] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    if ends:
        end = SPECIAL[0]
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, made.token_to_id(end))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[0])


def save(
    name: str,
    model: PreTrainedModel,
    words: PreTrainedTokenizerFast,
    found: dict[str, torch.Tensor],
    facts: dict[str, object],
) -> None:
    """One file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = load_file(Path(folder) / "model.safetensors")
        config = (Path(folder) / "config.json").read_text()
    metadata = {
        "config": config,
        "tokenizer": words.backend_tokenizer.to_str(),
        **{key: json.dumps(value, ensure_ascii=False) for key, value in facts.items()},
    }
    tensors = {f"weights/{key}": tensor for key, tensor in weights.items()} | found
    save_file(tensors, DATA / f"{name}.safetensors", metadata)


@torch.inference_mode()
def make_embeddings() -> None:
    """The vectors of ``TEXTS``, pooled as sentence-transformers does."""
    torch.manual_seed(0)
    words = tokenizer(ends=True)
    model = Qwen3Model(Qwen3Config(vocab_size=len(words), **SIZES)).float().eval()
    ids = [words(text).input_ids for text in TEXTS]
    states = [model(torch.tensor([row])).last_hidden_state[0] for row in ids]
    found = {
        "last": torch.stack([row[-1] for row in states]),
        "mean": torch.stack([row.mean(0) for row in states]),
        "cls": torch.stack([row[0] for row in states]),
    }
    save("embeddings", model, words, found, {"texts": TEXTS, "token_ids": ids})


@torch.inference_mode()
def make_reranker() -> None:
    """The scores of ``DOCUMENTS`` for ``QUERY``, as Qwen3-Reranker's model card computes them."""
    torch.manual_seed(1)
    words = tokenizer(ends=False)
    config = Qwen3Config(vocab_size=len(words), initializer_range=0.2, **SIZES)
    model = Qwen3ForCausalLM(config).float().eval()
    prompts = [
        f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}{SUFFIX}"
        for document in DOCUMENTS
    ]
    yes, no = (words.convert_tokens_to_ids(word) for word in WORDS)
    scores = []
    for prompt in prompts:
        logits = model(torch.tensor([words(prompt).input_ids])).logits[0, -1]
        scores.append(torch.stack([logits[no], logits[yes]]).softmax(0)[1])
    facts = {"query": QUERY, "documents": DOCUMENTS, "prompts": prompts}
    save("reranker", model, words, {"scores": torch.stack(scores)}, facts)


if __name__ == "__main__":
    make_embeddings()
    make_reranker()
