"""Page hashes: a chained hash for each full page of tokens.

The digest of a page covers the salt and every token up to the page's end, so equal digests mean
equal KV. The chain is as in vLLM (automatic prefix caching).
"""

from __future__ import annotations

from collections.abc import Generator
from hashlib import blake2b

from jaxinfer.core.intlog import IntLog

DIGEST_SIZE = 16  # bytes; 128 bits make a chance collision of contents irrelevant


def following_page_hashes(
    page_hashes: tuple[bytes, ...], salt: str, token_ids: IntLog, num_pages: int, page_size: int
) -> Generator[bytes]:
    """Yield the digests of the full pages after ``page_hashes``, up to ``num_pages`` in all.

    Each is computed on demand.
    """
    known = len(page_hashes)
    parent = page_hashes[-1] if page_hashes else _digest(salt.encode())
    tokens = token_ids.array()[known * page_size : num_pages * page_size].tobytes()
    stride = page_size * 4  # int32
    for start in range(0, len(tokens), stride):
        parent = _digest(parent + tokens[start : start + stride])
        yield parent


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE).digest()
