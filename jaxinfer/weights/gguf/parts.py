"""A GGUF file that is split into several: ``m-00001-of-00003.gguf`` and so on, as llama.cpp's
llama-gguf-split writes them. The first part has the metadata, each part some of the tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError, SourceError
from jaxinfer.weights.gguf.header import GGUFHeader, GGUFTensor, read_header
from jaxinfer.weights.names import part_of

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"


def read_whole(path: Path) -> GGUFHeader:
    """The header of a file with the tensors of all its parts, of which ``path`` is the first.

    Raises ``SourceError`` if ``path`` is another part or the others cannot be found by its name,
    and ``CheckpointError`` if the parts do not belong together.
    """
    first = read_header(path)
    if first.metadata.get(COUNT, 0) in (0, 1):
        return first
    part = part_of(path.stem)
    if part is None or part.count != first.metadata[COUNT]:
        raise SourceError(
            f"{path} is one part of a GGUF file that is split into {short(first.metadata[COUNT])}; "
            "give the parts the names that llama.cpp wrote, such as NAME-00001-of-00002.gguf"
        )
    count = part.count
    files = [path.with_name(f"{part.name}-{n + 1:05}-of-{count:05}.gguf") for n in range(count)]
    if part.number != 1:
        raise SourceError(f"{path} is part {part.number} of {count}; give the first, {files[0]}")
    for file in files:
        if not file.is_file():
            raise SourceError(f"{file} is missing; download it into the folder of {path.name}")
    headers = [first, *map(read_header, files[1:])]
    tensors: dict[str, GGUFTensor] = {}
    for number, header in enumerate(headers):
        if (header.metadata.get(COUNT), header.metadata.get(NUMBER)) != (count, number):
            raise CheckpointError(
                f"{header.path} is not part {number + 1} of {count}, as its name says; download it "
                "again"
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise CheckpointError(
                f"{header.path} has the tensor {short(min(twice))}, which an earlier part has too; "
                "download the parts again"
            )
        tensors |= header.tensors
    expected = first.metadata.get(TENSORS, len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"the parts of {path} have {len(tensors)} tensors instead of {short(expected)}; "
            "download them again"
        )
    digests = "".join(header.digest for header in headers)
    digest = hashlib.sha256(digests.encode()).hexdigest()
    return replace(first, tensors=tensors, digest=digest, files=tuple(files))
