"""A router's side of KV events: a decoder in the field order of llm-d's and Dynamo's, an index.

Both read a batch as an array (time, events, rank). An event is a map with ``type``, or in older
versions of vLLM an array whose fields have the order of ``STORED`` and ``REMOVED``; llm-d gives the
fields of a map these places (llm-d-router, ``engineadapter/vllm_adapter.go``).
"""

from __future__ import annotations

from typing import Any

import msgspec

STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "kv_cache_spec_sliding_window",
)
REMOVED = ("block_hashes", "medium", "group_idx")


def decode(body: bytes) -> tuple[list[tuple[Any, ...]], int]:
    """The events of a batch, each as its tag and its fields in order, and the rank."""
    ts, events, rank = msgspec.msgpack.decode(body)
    assert isinstance(ts, float) and isinstance(rank, int)
    return [positional(event) for event in events], rank


def positional(event: dict[str, Any]) -> tuple[Any, ...]:
    """An event as its tag and its fields in order."""
    order = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}[event["type"]]
    assert {*event} <= {"type", *order}, event
    if event["type"] == "BlockStored":  # vLLM has no defaults for these
        assert {*STORED[:7]} <= {*event}
    return (event["type"], *(event.get(name) for name in order))


class Index:
    """The blocks of an engine, by hash: each the tokens of the whole prefix up to its end."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def apply(self, event: tuple[Any, ...]) -> None:
        match event:
            case (
                "BlockStored",
                hashes,
                parent,
                tokens,
                size,
                None,
                "GPU",
                None,
                _,
                group,
                kind,
                _,
            ):
                assert len(tokens) == size * len(hashes) and kind == "full_attention"
                assert all(0 <= one < 1 << 64 for one in hashes) and isinstance(group, int)
                prefix = () if parent is None else self.blocks[parent]  # the parent is known
                for number, one in enumerate(hashes):
                    prefix += tuple(tokens[number * size : (number + 1) * size])
                    assert one not in self.blocks
                    self.blocks[one] = prefix
            case ("BlockRemoved", hashes, "GPU", group):
                assert isinstance(group, int)
                for one in hashes:
                    del self.blocks[one]
            case ("AllBlocksCleared",):
                self.blocks.clear()
            case _:
                raise AssertionError(event)
