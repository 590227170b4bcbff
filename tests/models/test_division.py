"""The parts of parameters that devices have: they are those of the whole, and fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.base import Model
from jaxinfer.models.division import (
    SourceShare,
    in_device_order,
    in_model_order,
    on_devices,
    own_part,
    source_shares,
)
from jaxinfer.models.params import nested
from jaxinfer.models.quantised import sizes_by_form
from jaxinfer.models.registry import build_model
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.placement import Fused, positions, slices_experts
from jaxinfer.nn.weight import stored
from jaxinfer.weights.plan import plan_params
from kit.checkpoints import random_hf_tensors
from kit.memory_checkpoint import InMemory
from kit.quantised_models import quantised_tensors
from kit.tiny_models import CONFIGS
from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import dequantised
from pallas_kernels.quantised_gemm.cases import FORMS, random_matrix

QKV = Fused("heads", (8, 4, 4), (4, 2, 2))  # 4 query heads of width 2 and 2 KV heads


def test_each_device_has_a_share_of_every_part() -> None:
    found = positions(QKV, 16, 2)
    np.testing.assert_array_equal(found, [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]])


def test_a_head_is_on_several_devices_where_there_are_fewer_heads() -> None:
    found = positions(QKV, 16, 4)
    np.testing.assert_array_equal(
        found,
        [
            [0, 1, 8, 9, 12, 13],
            [2, 3, 8, 9, 12, 13],
            [4, 5, 10, 11, 14, 15],
            [6, 7, 10, 11, 14, 15],
        ],
    )
    with pytest.raises(ValueError, match="2 units cannot be divided among 3 devices"):
        positions(Fused("heads", (6, 4), (3, 2)), 10, 3)


def test_the_last_devices_have_zeros_behind_the_vocabulary() -> None:
    found = positions("vocab", 130, 3)
    assert found.shape == (3, 64)
    assert found[2].tolist() == [128, 129] + [-1] * 62
    array = np.ones((130, 2), np.float32)
    whole = ArraySpec((130, 2), ("vocab", None), np.dtype(np.float32))
    assert own_part(array, whole, 3, 2).sum() == 4
    assert positions("vocab", 151936, 2).shape == (2, 75968)  # no zeros


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("axis", [QKV, "vocab", "ffn", Fused("ffn", (8, 8))])
def test_the_order_of_devices_has_an_inverse(axis: Any, devices: int) -> None:
    whole = ArraySpec((3, 16), (None, axis), np.dtype(np.float32))
    array = np.arange(48, dtype=np.float32).reshape(3, 16)
    made = in_device_order(array, whole, devices)
    assert made.shape == on_devices(whole, devices).shape
    parts = [own_part(array, whole, devices, rank) for rank in range(devices)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), made)
    np.testing.assert_array_equal(in_model_order(made, whole, devices), array)


@pytest.mark.parametrize(
    ("width", "devices", "block", "slices"),
    [
        (768, 2, 1, True),  # Qwen3-30B-A3B
        (768, 4, 1, True),
        (768, 4, 128, False),  # in fp8 with blocks
        (1408, 4, 1, False),  # DeepSeek-V2-Lite
        (2880, 2, 32, False),  # gpt-oss
        (14336, 8, 128, True),  # Mixtral
    ],
)
def test_experts_are_sliced_where_kernels_can_read_the_slices(
    width: int, devices: int, block: int, slices: bool
) -> None:
    assert slices_experts(width, devices, block) == slices
    assert not slices_experts(width, devices, block, whole=True)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_quantised_matrices(form: str) -> None:
    """A part has exactly the values of the whole, also where its groups must be smaller."""
    group = {"q4_k": 32, "q5_k": 32, "q6_k": 16, "fp8": 128, "fp8_blocks": 128}.get(form, 64)
    w = random_matrix(np.random.default_rng(0), form, 256, 768, group)
    values = np.asarray(dequantised(w))
    for share, rank, own in (
        (SourceShare(positions("heads", 256, 4), None), 1, np.s_[64:128]),
        (SourceShare(positions(QKV_256, 256, 2), None), 1, QKV_256_SECOND),
        (SourceShare(positions("vocab", 256, 3), None), 1, np.s_[128:256]),
        (SourceShare(None, positions("ffn", 768, 2)), 1, np.s_[:, 384:]),
        (SourceShare(None, positions("ffn", 768, 8)), 3, np.s_[:, 288:384]),
    ):
        made = share.take(w, rank, share.form(w.form, "w"), by_inputs=False)
        np.testing.assert_array_equal(dequantised(made), values[own], err_msg=f"{share}")
        assert made.form == share.form(w.form, "w")


QKV_256 = Fused("heads", (128, 64, 64), (4, 2, 2))
QKV_256_SECOND = np.r_[64:128, 160:192, 224:256]


def test_groups_that_become_too_small_are_refused() -> None:
    w = random_matrix(np.random.default_rng(0), "int4", 64, 192, 64)
    share = SourceShare(None, positions("ffn", 192, 12))
    with pytest.raises(CheckpointError, match="groups of 64 inputs .* each of 12 devices has 16"):
        share.form(w.form, "w")


def test_joined_tensors_give_their_own_rows() -> None:
    shares = source_shares(QKV, None, [(8, 3), (4, 3), (4, 3)], 4)
    assert [share.outputs[3].tolist() for share in shares] == [[6, 7], [2, 3], [2, 3]]  # type: ignore[index]


@pytest.mark.parametrize("devices", [2, 4])
def test_parts_of_parameters_are_those_of_the_whole(devices: int) -> None:
    """The parts of a family's float parameters that devices build are the whole in their order."""
    for name in ("llama", "gpt2", "phi3", "olmo2", "qwen3_5", "gemma4", "deepseek_v3", "gpt_oss"):
        config = dict(CONFIGS[name])
        config |= {"num_local_experts": 8} if name == "gpt_oss" else {}
        config |= {"linear_num_key_heads": 4} if name == "qwen3_5" else {}
        model = build_model(config, "float32")
        checkpoint = InMemory(random_hf_tensors(model))
        wholes = {
            path: a
            for one in plan_params(model, checkpoint)
            for path, a in one.whole(checkpoint).items()
        }
        divided = replace(model, devices=devices)
        for planned in plan_params(divided, checkpoint):
            for path, array in _joined(planned, checkpoint, divided).items():
                expected = in_device_order(wholes[path], model.arrays[path], devices)
                np.testing.assert_array_equal(array, expected, err_msg=f"{name} {path}")


def _joined(planned: Any, checkpoint: Any, model: Model) -> dict[str, np.ndarray]:
    """The parts of all devices, joined."""
    pieces = range(planned.spec.pieces or 1)
    parts: dict[str, list[list[np.ndarray]]] = {
        path: [[] for _ in range(model.devices)] for path in planned.arrays
    }
    for piece in pieces:
        ranks = planned.spec.ranks_of(piece)
        for rank, made in zip(ranks, planned.parts(checkpoint, piece), strict=True):
            for path, array in made.items():
                parts[path][rank].append(array)
    found: dict[str, np.ndarray] = {}
    for path, array in planned.arrays.items():
        own = [np.stack(p) if planned.spec.pieces else p[0] for p in parts[path]]
        axis = next((i for i, one in enumerate(array.axes) if one is not None), None)
        found[path] = own[0] if axis is None else np.concatenate(own, axis=axis)
        assert found[path].shape == array.shape, path
    return found


@pytest.mark.parametrize("arrangement", [pytest.param(None, marks=pytest.mark.nightly), LANES.name])
def test_every_form_in_a_model(arrangement: str | None) -> None:
    """Each device's part of every quantised matrix has the values of its part of the whole."""
    model, checkpoint = quantised_tensors()
    whole = plan_params(replace(model, arrangement=None), checkpoint)
    divided = plan_params(replace(model, arrangement=arrangement, devices=2), checkpoint)
    for one, two in zip(whole, divided, strict=True):
        if two.spec.matrix is None or one.spec.path in ("embed", "lm_head"):
            continue
        values = _values(one.whole(checkpoint), one.spec.path)
        (declared,) = two.spec.wholes.values()
        *_, part = two.parts(checkpoint)
        expected = own_part(values, declared, 2, 1)
        np.testing.assert_array_equal(_values(part, two.spec.path), expected, two.spec.path)


def _values(arrays: dict[str, np.ndarray], path: str) -> np.ndarray:  # [I, O]
    tree: Any = nested({p: jax.numpy.asarray(a) for p, a in arrays.items()})
    for name in path.split("/"):
        tree = tree[name]
    return np.asarray(stored(tree).dense(np.dtype(np.float32)))


def test_sizes_are_those_of_a_device() -> None:
    model, _ = quantised_tensors()
    plain = np.dtype(np.float32)
    whole, own = (sizes_by_form(replace(model, devices=n).param_specs, plain) for n in (1, 2))
    assert {form: size.count for form, size in own.items()} == {
        form: size.count for form, size in whole.items()
    }
    for form in ("int4 g64", "fp4 g64"):  # the head, in int8, has zeros behind the vocabulary
        assert own[form].nbytes == whole[form].nbytes // 2, form
    arrays = replace(model, devices=2).arrays
    total = sum(a.nbytes // (2 if any(a.axes) else 1) for a in arrays.values())
    assert sum(size.nbytes for size in own.values()) == total


def test_state_is_divided_by_heads() -> None:
    model = build_model({**CONFIGS["qwen3_5"], "linear_num_key_heads": 4}, "float32")
    for devices in (2, 4):
        own = replace(model, devices=devices)
        # two KV heads of width 16, of which every device has one
        entries = {entry.name: entry for entry in own.state.arrays}
        assert entries["k"].shape == (max(2, devices), 16)
        assert entries["k"].nbytes == 16 * 4
        assert entries["delta"].shape == (4, 16, 12)
        assert own.state.bytes_per_slot == model.state.bytes_per_slot // devices
    latent = replace(build_model(CONFIGS["deepseek_v3"], "float32"), devices=2)
    assert (
        latent.state.bytes_per_entry
        == build_model(CONFIGS["deepseek_v3"], "float32").state.bytes_per_entry
    )
