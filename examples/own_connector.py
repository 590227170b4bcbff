"""A store of your own behind the KV cache: here objects in a bucket, as in S3.

The engine saves pages in host memory before it evicts them (``kv_offloading_size``), and a thread
of this connector copies them to the bucket. Other engines of the same model that use the bucket
restore them, as ``is_shared`` lets the engine ask for the keys of every prompt.

    jaxinfer serve MODEL --kv-offloading-size 4 --kv-connector examples/own_connector.py:connect
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.core.connector import Connector, Content, Forms, Polled, Unit
from jaxinfer.core.tiers import group_of

# an object is a file here: replace these three by a client's put_object, get_object, head_object
BUCKET = Path(tempfile.gettempdir(), f"bucket-{os.getpid()}")


def put_object(name: str, content: bytes) -> None:
    path = BUCKET / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)


def get_object(name: str) -> bytes | None:
    return (BUCKET / name).read_bytes() if has_object(name) else None


def has_object(name: str) -> bool:
    return (BUCKET / name).exists()


class ObjectStore:
    """A connector: see ``jaxinfer.core.connector.Connector`` for its methods."""

    is_shared = True

    def __init__(self, forms: Forms, prefix: str) -> None:
        self._forms, self._prefix, self._version = forms, prefix, ""
        self._work: queue.Queue[tuple[int, Sequence[bytes]] | Unit | None] = queue.Queue()
        self._lock, self._polled = threading.Condition(), Polled()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}/{self._version or 'first'}/{key.hex()}"

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if has_object(self._name(key))]

    def reserve(self, group: int, key: bytes) -> Content | None:
        return None if self.match((key,)) else self._forms[group].new()

    def save(self, unit: Unit) -> bool:
        self._work.put(unit)
        return True

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        self._work.put((ticket, keys))

    def poll(self, seconds: float = 0.0) -> Polled:
        with self._lock:
            self._lock.wait_for(lambda: bool(self._polled), seconds)
            polled, self._polled = self._polled, Polled()
            return polled

    def finished(self, ticket: int) -> None:
        with self._lock:
            self._polled.loaded.pop(ticket, None)

    def clear(self, version: bytes) -> None:
        """Units of other weights have other names; those of other engines stay."""
        self._version = version.hex()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            if isinstance(task, Unit):
                put_object(self._name(task.key), task.content.tobytes())
                with self._lock:
                    self._polled.saved.append(task)
                    self._polled.added.append(task.key)
                    self._lock.notify()
                continue
            ticket, keys = task
            units = [self._get(key) for key in keys]
            with self._lock:
                self._polled.loaded[ticket] = units
                self._lock.notify()

    def _get(self, key: bytes) -> Unit | None:
        """A unit; None if it is not there, or not whole: then the engine computes it."""
        content, group = get_object(self._name(key)), group_of(key)
        if content is None or len(content) != self._forms[group].num_bytes:
            return None
        return Unit(group, key, np.frombuffer(content, np.uint8))


def connect(forms: Forms) -> Connector:
    """The connector of an engine whose units have these arrays."""
    return ObjectStore(forms, "smollm2-135m-instruct/float32")


if __name__ == "__main__":
    story = "Once upon a time there was a king who counted his ships every morning. " * 12
    for number in range(2):  # the second engine restores what the first one has computed
        llm = LLM(
            "smollm2-135m-instruct",
            num_pages=30,  # so few that the first prompt is evicted by the second one
            max_num_seqs=2,
            max_model_len=448,
            kv_offloading_size=0.1,
            kv_connector=f"{__file__}:connect",
        )
        for prompt in (story, "Numbers from one to ten. " * 68):
            (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
            print(f"engine {number} reused {output.num_cached_tokens} tokens")
    shutil.rmtree(BUCKET)
