"""Changes of one key of a config.json at a time: other values, wrong ones, none.

Also imported by ``tests/golden/make_config_keys.py`` in an environment without JAX.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

# keys that a rope section of another kind has
_OF_ROPES = {
    "factor": 2.0,
    "partial_rotary_factor": 0.5,
    "rope_theta": 123.0,
    "attention_factor": 1.5,
    "original_max_position_embeddings": 16,
    "mscale": 0.5,
    "beta_fast": 3.0,
    "truncate": False,
    "alpha": 3.0,
    "llama_4_scaling_beta": 0.5,
}
_NAMES = ("architectures", "model_type")  # they say whose config it is
# of all models: initial values, labels, outputs and token ids, which get few other values
_FEW = frozenset(
    {
        *("_name_or_path", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype"),
        *("eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id"),
        *("pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef"),
        *("transformers_version", "use_cache"),
    }
)


def changes(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name, "KEY=VALUE", and the config with one key changed, for many values of each key.

    Keys of objects are changed, too, and rope sections get keys of other kinds of rope.
    """
    yield from _within(dict(config), ())


def _within(config: dict[str, Any], place: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    section = _section(config, place)
    for key in sorted(section):
        value = section[key]
        if key in _NAMES:
            continue
        name = ".".join((*place, key))
        yield f"{name} missing", _changed(config, place, key, None, missing=True)
        others = [None, 0, "x"] if key in _FEW else _others(value)
        for other in (one for one in others if one is not value):
            yield f"{name}={_shown(other)}", _changed(config, place, key, other)
        if isinstance(value, dict) and value and key not in _FEW:
            yield from _within(config, (*place, key))
            for more, other in _OF_ROPES.items() if "rope_type" in value else ():
                if more not in value:
                    within = (*place, key)
                    yield f"{name}.{more}={other}", _changed(config, within, more, other)


def _section(config: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    for key in place:
        config = config[key]
    return config


def _changed(
    config: dict[str, Any], place: tuple[str, ...], key: str, value: Any, *, missing: bool = False
) -> dict[str, Any]:
    found = copy.deepcopy(config)
    section = _section(found, place)
    if missing:
        del section[key]
    else:
        section[key] = value
    return found


def _others(value: Any) -> list[Any]:
    """Other values of the same type and of other types."""
    if value is None:
        return [True, 0, 1, 3, -1, 0.5, "x", [1], {"a": 1}]
    if isinstance(value, bool):
        return [None, not value, 2, "x", [value]]
    if isinstance(value, int):
        numbers = [value + 1, 2 * value, 0, 2, -1, 2**40, value + 0.5]
        return [None, *dict.fromkeys(n for n in numbers if n != value), str(value), [value], True]
    if isinstance(value, float):
        numbers = [2 * value, 0.0, 1.0, -value, 1e38, 1e-40, 1e39]
        others = dict.fromkeys(n for n in numbers if n != value)
        return [None, *others, float("nan"), float("inf"), "x", [value], True]
    if isinstance(value, str):
        return [None, "other", "", 5, [value], {"a": value}]
    if isinstance(value, list):
        kinds = [[kind] * len(value) for kind in dict.fromkeys(map(str, value)) if value]
        kinds = kinds if len(kinds) > 1 and isinstance(value[0], str) else []
        lists = [[], value[:-1], [*value, *value[-1:]], value[::-1], *kinds]
        wrong = [["x"] * len(value), [-1] * len(value), [None] * len(value), "x", 1]
        return [None, *(one for one in (*lists, *wrong) if one != value)]
    return [None, {}, "x", [1], {**value, "unknown_key": 1}]


def _shown(value: Any) -> str:
    """The value, of a long list its kinds, for the name of a change."""
    text = str(value)
    if isinstance(value, list) and len(text) > 30:
        return f"{len(value)} of {'/'.join(map(str, value))}"[:60]
    return text if len(text) <= 60 else f"{text[:50]}..."
