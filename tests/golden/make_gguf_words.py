"""Makes llama.cpp's words of the texts of ``kit.gguf_words``, for each pre-tokenizer.

A tool, run by hand in an environment of its own with llama-cpp-python (0.3.36 made the file that is
committed); tests read only its output. The GGUF files come from the project's environment:

    PYTHONPATH=.:tests python -m kit.gguf_words FOLDER
    python make_gguf_words.py FOLDER

data/gguf_words.json.gz holds the texts; of each name the numbers of bytes of the words (names
with equal words share a list), whether a word of the vocabulary is one token although no merges
produce it, and whether bos is added if the metadata does not say.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import llama_cpp
from llama_cpp import Llama

DATA = Path(__file__).parent / "data"


def main(folder: Path) -> None:
    """Tokenise the texts with each file of the folder."""
    given = json.loads((folder / "texts.json").read_text())
    found: dict[str, list[list[int]]] = {}
    rules: dict[str, dict[str, object]] = {}
    for path in sorted(folder.glob("*.gguf")):
        model = Llama(str(path), vocab_only=True, verbose=False)
        lengths = [words_of(model, text) for text in given["texts"]]
        unmerged = model.tokenize(given["unmerged"].encode(), add_bos=False, special=False)
        key = next((key for key, other in found.items() if other == lengths), path.stem)
        found[key] = lengths
        rules[path.stem] = {
            "words": key,
            "whole_words": len(unmerged) == 1,
            "add_bos": bool(model.tokenize(b"", add_bos=True, special=False)),
        }
    content = {"texts": given["texts"], "words": found, "rules": rules}
    packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)
    (DATA / "gguf_words.json.gz").write_bytes(packed)


def words_of(model: Llama, text: str) -> list[int]:
    """The number of bytes of each token, which is a word: a character of its text is a byte."""
    ids = model.tokenize(text.encode(), add_bos=False, special=False)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    sizes = [len(llama_cpp.llama_vocab_get_text(vocab, token_id).decode()) for token_id in ids]
    assert sum(sizes) == len(text.encode()), (text, sizes)
    return sizes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
