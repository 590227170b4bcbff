"""Transfers of a repository's large files into the hub's cache, which go on where they broke off.

huggingface-hub (2.4) deletes a partial file when its process ends. Here it stays, as
``blobs/HASH.incomplete``, and the next transfer asks for the rest. The file gets its place in the
cache under the lock that huggingface-hub takes itself, so two processes fetch it once; afterwards
huggingface-hub finds it and links it into its snapshot. The hash is that of the whole file, which
is checked.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.core.errors import SourceError
from jaxinfer.core.progress import Advance

_AT_ONCE = 4  # files
_PARTIAL = ".incomplete"


@dataclass(frozen=True)
class Blob:
    """A file that the hub stores by its hash, and its places in the cache."""

    name: str
    url: str
    size: int
    sha256: str
    path: Path
    lock: Path

    @property
    def partial(self) -> Path:
        """The file while it is not complete."""
        return self.path.with_name(self.path.name + _PARTIAL)

    def missing_bytes(self) -> int:
        """The bytes that are still to be transferred."""
        if self.path.exists():
            return 0
        here = self.partial.stat().st_size if self.partial.exists() else 0
        return self.size - here if here <= self.size else self.size


def transfer(blobs: Sequence[Blob], advance: Advance) -> None:
    """Fetch several files at once; ``advance`` counts their missing bytes.

    After a failure or Ctrl-C the other transfers end at their next chunk. Raises ``SourceError``
    for a file with another hash, and the errors of ``huggingface_hub.file_download.http_get``.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(_AT_ONCE, "jaxinfer-transfer")
    try:
        running = [pool.submit(_fetch, blob, advance, stop) for blob in blobs]
        for done in as_completed(running):
            done.result()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _fetch(blob: Blob, advance: Advance, stop: threading.Event) -> None:
    from huggingface_hub.utils import WeakFileLock

    expected = blob.missing_bytes()
    for folder in (blob.path.parent, blob.lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(blob.lock):
        if blob.path.exists():  # another process has fetched it
            advance(expected)
            return
        left = blob.missing_bytes()
        if left == blob.size:
            blob.partial.unlink(missing_ok=True)
        advance(expected - left)
        while _fetch_some(blob, partial(_Bar, advance, stop)):
            pass  # a connection that was reset in the middle
        _check_hash(blob)
        blob.partial.rename(blob.path)


def _fetch_some(blob: Blob, bar: Any) -> bool:
    """Fetch the rest of a file; True if the connection broke, and some has arrived."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    left = blob.missing_bytes()
    try:
        with blob.partial.open("ab") as file:
            http_get(
                blob.url,
                file,
                resume_size=blob.size - left,
                headers=build_hf_headers() | {"Accept-Encoding": "identity"},
                expected_size=blob.size,
                tqdm_class=bar,
            )
    except (HfHubHTTPError, _Stopped):
        raise
    except OSError as error:
        if error.errno is None:  # it has another size than the file: a proxy's page
            blob.partial.unlink()
        raise
    except Exception:  # of the HTTP client, whose package may change
        if blob.missing_bytes() == left:
            raise
        return True
    return False


def _check_hash(blob: Blob) -> None:
    with blob.partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.sha256:
        blob.partial.unlink()
        raise SourceError(
            f"{blob.name} arrived damaged (its SHA-256 is {digest}, not {blob.sha256}); run again"
        )


class _Stopped(Exception):
    """Ends a transfer whose result is no longer needed."""


class _Bar:
    """A progress bar for ``http_get``."""

    def __init__(self, advance: Callable[[float], None], stop: threading.Event, **_: Any) -> None:
        self._advance = advance
        self._stop = stop

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, amount: float) -> None:
        """Count transferred bytes; called after each chunk, before it is written."""
        if self._stop.is_set():
            raise _Stopped
        self._advance(amount)
