"""Damages small model files many times and reads them as an engine does, within a limit of memory.

Each kind of file has an oracle: a damaged file that is accepted is read as the format's own reader
reads it (the libraries safetensors, gguf, json and tokenizers). Run as a program, with a kind and a
number, it prints the counts.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import tokenizers
from safetensors import safe_open

from jaxinfer.core.errors import JaxinferError
from jaxinfer.engine.requests.facts import facts_of_configs
from jaxinfer.models.registry import build_model, decoder_config
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.weights.gguf.header import read_header
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import ModelSource
from kit.checkpoints import (
    random_hf_tensors,
    tiny_llama_config,
    tiny_qwen3_moe_config,
    write_gguf,
    write_hf_folder,
)
from kit.model_sources import resolve
from kit.mutations import damaged_bytes, damaged_gguf, damaged_json
from kit.tokenizers import tiny_tokenizer_json

SPARE_BYTES = 1 << 30  # that reading may take beyond what the process has
TEXT = "Once upon a time <|eos|> 42 é"


class Kind(NamedTuple):
    """Makes the files in a folder, damages one of them, and reads the result with its oracle.

    ``read`` returns values to compare with those of ``oracle``, and the weights.
    """

    make: Callable[[Path], None]
    damage: Callable[[Path, random.Random], None]
    read: Callable[[Path], tuple[Any, dict[str, Any]]]  # raises ``JaxinferError``
    oracle: Callable[[Path], Any]


def weights_of(source: ModelSource) -> dict[str, np.ndarray]:
    """The tensors that the model is made of, after every check."""
    model = build_model(decoder_config(source.hf_config), "float32")
    facts_of_configs(
        source.name,
        model.config.vocab_size,
        source.hf_config,
        source.generation_config,
        use_generation_config=True,
    )
    assert source.checkpoint is not None
    names = {name for one in plan_params(model, source.checkpoint) for name in one.names}
    return {name: source.checkpoint.read(name) for name in names}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return repr(one) == repr(other)  # NaN equals NaN


# safetensors and its index: only headers are damaged, as the data has no hash


def make_folder(folder: Path) -> None:
    config = tiny_llama_config(num_hidden_layers=1)
    tensors = random_hf_tensors(build_model(config, "float32"))
    write_hf_folder(folder, config, tensors, shards=2)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_p": 0.9, "eos_token_id": [1, 2], "bos_token_id": 1}'
    )


def damage_shard(folder: Path, draw: random.Random) -> None:
    if draw.random() < 0.3:
        path = folder / "model.safetensors.index.json"
        content, how = path.read_bytes(), draw.choice((damaged_bytes, damaged_json))
        path.write_bytes(how(content, draw))
        return
    path = sorted(folder.glob("*.safetensors"))[draw.randrange(2)]
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    if draw.random() < 0.5:
        path.write_bytes(damaged_bytes(content, draw, end))
        return
    header = damaged_json(content[8:end], draw)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def library_weights(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def read_folder(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    weights = weights_of(resolve(folder))
    return weights, weights


# config.json and generation_config.json


def damage_config(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(("config.json", "config.json", "generation_config.json"))
    how = draw.choice((damaged_bytes, damaged_json, damaged_json))
    path.write_bytes(how(path.read_bytes(), draw))


def read_config(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    source = resolve(folder)
    return ({**source.hf_config}, {**source.generation_config}), weights_of(source)


def json_config(folder: Path) -> Any:
    config, generation = (
        json.loads((folder / f"{name}.json").read_bytes())
        for name in ("config", "generation_config")
    )
    quantised = ("quantization_config", "compression_config")
    return {key: value for key, value in config.items() if key not in quantised}, generation


def make_experts(folder: Path) -> None:
    config = tiny_qwen3_moe_config(num_hidden_layers=2)
    write_hf_folder(folder, config, random_hf_tensors(build_model(config, "float32")))
    (folder / "generation_config.json").write_text('{"top_k": 20, "eos_token_id": 2}')


# GGUF: the header, with the tokenizer's metadata


def make_gguf(folder: Path) -> None:
    config = tiny_llama_config(num_hidden_layers=1)
    tensors = random_hf_tensors(build_model(config, "float32"))
    write_gguf(folder / "m.gguf", config, tensors)


def damage_gguf(folder: Path, draw: random.Random) -> None:
    path = folder / "m.gguf"
    content = path.read_bytes()
    end = min(one.offset for one in read_header(path).tensors.values())
    path.write_bytes(damaged_gguf(content, draw, end))


def read_gguf(folder: Path) -> tuple[Any, dict[str, Any]]:
    source = resolve(folder / "m.gguf")
    weights_of(source)
    for encodes in (False, True):
        load_tokenizer(source.tokenizer_spec(), encodes=encodes)
    header = read_header(folder / "m.gguf")
    with (folder / "m.gguf").open("rb") as file:
        data = file.read()
    tensors = {
        name: (one.shape, int(one.type), data[one.offset : one.offset + one.nbytes])
        for name, one in header.tensors.items()
    }
    return (dict(header.metadata), tensors), tensors


def gguf_values(folder: Path) -> Any:
    reader = gguf.GGUFReader(folder / "m.gguf")
    own = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    fields = reader.fields.items()
    metadata = {name: _lossy(field) for name, field in fields if name not in own}
    tensors = {
        one.name: (
            tuple(int(size) for size in reversed(one.shape)),
            int(one.tensor_type),
            one.data.tobytes(),
        )
        for one in reader.tensors
    }
    return metadata, tensors


def _lossy(field: Any) -> Any:
    """A field's value; unlike the library's ``contents``, with U+FFFD for bytes of no character."""
    kinds, texts = field.types, (gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY)
    if kinds[-1] != texts[0]:
        return field.contents()
    found = [bytes(field.parts[at]).decode("utf-8", "replace") for at in field.data]
    return found if kinds[0] == texts[1] else found[0]


# the tokenizer's files


def make_tokenizer(folder: Path) -> None:
    make_folder(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    config = {"model_max_length": 512, "bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    config |= {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|eos|>"}')


def damage_tokenizer(folder: Path, draw: random.Random) -> None:
    names = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    path = folder / draw.choice(names)
    how = draw.choice((damaged_bytes, damaged_json, damaged_json))
    path.write_bytes(how(path.read_bytes(), draw))


def read_tokenizer(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    source = resolve(folder)
    read, built = (load_tokenizer(source.tokenizer_spec(), encodes=one) for one in (False, True))
    ids, vocabulary = built.encode(TEXT), built.get_vocab()
    assert {token: read.convert_tokens_to_ids(token) for token in vocabulary} == vocabulary
    assert read.special_token_ids == built.special_token_ids
    return (ids, vocabulary), weights_of(source)


def library_tokens(folder: Path) -> Any:
    built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    built.no_truncation()
    built.no_padding()
    return built.encode(TEXT).ids, built.get_vocab(with_added_tokens=True)


KINDS = {
    "safetensors": Kind(make_folder, damage_shard, read_folder, library_weights),
    "config": Kind(make_folder, damage_config, read_config, json_config),
    "experts": Kind(make_experts, damage_config, read_config, json_config),
    "gguf": Kind(make_gguf, damage_gguf, read_gguf, gguf_values),
    "tokenizer": Kind(make_tokenizer, damage_tokenizer, read_tokenizer, library_tokens),
}


def read_damaged(name: str, count: int, seed: int = 0) -> Counter[str]:
    """How many files were refused, were as before, or were another valid file.

    Raises ``AssertionError``, with the seed of the damage, for any other exception, for a file that
    is not read as the oracle reads it, and for other weights.
    """
    kind, found = KINDS[name], Counter[str]()
    with tempfile.TemporaryDirectory() as parent:
        Path(parent, "whole").mkdir()
        kind.make(Path(parent, "whole"))
        whole, weights = kind.read(Path(parent, "whole"))
        kept = {one.name: one.read_bytes() for one in Path(parent, "whole").iterdir()}
        folder = Path(parent, "damaged")
        folder.mkdir()
        for number in range(seed, seed + count):
            for file in folder.iterdir():
                file.unlink()
            for file, content in kept.items():
                (folder / file).write_bytes(content)
            kind.damage(folder, random.Random(f"{name} {number}"))
            try:
                read, found_weights = kind.read(folder)
            except JaxinferError as error:
                assert 0 < len(str(error)) < 2000, f"{name} {number}: {str(error)[:300]}"
                found["refused"] += 1
                continue
            except BaseException as error:
                raise AssertionError(f"{name} {number}: {type(error).__name__}: {error}") from error
            try:
                expected = kind.oracle(folder)
            except Exception as error:
                raise AssertionError(f"{name} {number}: accepted, but {error}") from error
            if name == "safetensors":  # files may have more tensors than the model uses
                expected = {one: expected.get(one) for one in read}
            assert same(read, expected), f"{name} {number}: read otherwise than by its own reader"
            assert same(found_weights, weights), f"{name} {number}: accepted with other weights"
            found["as before" if same(read, whole) else "another valid file"] += 1
    return found


def limit_memory() -> None:
    """Let this process take only ``SPARE_BYTES`` more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    read_damaged(sys.argv[1], 1)  # imports all that is needed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit_memory()
    print(dict(read_damaged(sys.argv[1], int(sys.argv[2]))))
    print("MiB", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
