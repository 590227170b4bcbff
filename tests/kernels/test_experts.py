"""experts and route: every token has its own experts, whatever the batch and the order."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.host_memory import release_zeros
from kit.residency import resident_pages
from pallas_kernels.experts import cases, native, ref, xla
from pallas_kernels.experts.api import ExpertsArgs, experts
from pallas_kernels.experts.stack import Activation
from pallas_kernels.experts.tiles import Tiles, max_tiles, tiles_of
from pallas_kernels.gemm import epilogues
from pallas_kernels.native.library import library, variants
from pallas_kernels.route.api import RouteArgs, route
from pallas_kernels.route.ref import shifted
from pallas_kernels.route.routing import Groups, Routing

T, COUNT, CHOSEN, D, F = 40, 7, 3, 64, 96


@pytest.fixture(params=range(len(variants())), ids=variants())
def variant(request: pytest.FixtureRequest) -> Iterator[int]:
    found = library()
    assert found is not None
    found.jaxinfer_choose(request.param)
    yield request.param
    found.jaxinfer_choose(0)


def case(name: str) -> Any:
    return next(one for one in cases.CASES if one.name == name)


def _without_nan(one: cases.ExpertsCase) -> ExpertsArgs:
    """The arguments of a case, with numbers in the weights of experts that no token chose."""
    (args,) = cases.build(one, seed=0).args
    stacks = jax.tree.map(np.nan_to_num, {"gate_up": args.gate_up, "down": args.down})
    return replace(args, **stacks)


def _with_tokens(args: ExpertsArgs, x: Any, choices: Any, weights: Any) -> ExpertsArgs:
    return replace(args, x=x, choices=choices, weights=weights)


@pytest.mark.parametrize("name", ["seven_experts", "int4_lanes", "fp4_lanes", "fp8_blocks_lanes"])
def test_native_bits_do_not_depend_on_the_other_tokens(name: str, variant: int) -> None:
    args = _without_nan(case(name))
    run = jax.jit(lambda *tokens: native.experts(_with_tokens(args, *tokens)))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((T, args.x.shape[1]), np.float32)
    choices = np.argsort(rng.random((T, COUNT)), axis=1)[:, :CHOSEN].astype(np.int32)
    weights = rng.random((T, CHOSEN), np.float32)
    whole = np.asarray(run(x, choices, weights))
    order = rng.permutation(T)
    shuffled = np.asarray(run(x[order], choices[order], weights[order]))
    np.testing.assert_array_equal(shuffled, whole[order])
    for some in (slice(1), slice(3, 8)):
        alone = np.asarray(run(x[some], choices[some], weights[some]))
        np.testing.assert_array_equal(alone, whole[some])


def test_xla_bits_depend_on_no_other_token() -> None:
    """In another order, or with others. All choose expert 2, whose tokens fill two tiles."""
    args = _without_nan(case("seven_experts"))
    run = jax.jit(lambda *tokens: xla.experts(_with_tokens(args, *tokens)))
    rng = np.random.default_rng(1)

    def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scores = rng.random((T, COUNT))
        scores[:, 2] = -1
        choices = np.argsort(scores, axis=1)[:, :CHOSEN].astype(np.int32)
        x = rng.standard_normal((T, args.x.shape[1]), np.float32)
        return x, choices, rng.random((T, CHOSEN), np.float32)

    own, others, order = tokens(), tokens(), rng.permutation(T)
    whole = np.asarray(run(*own))
    shuffled = np.asarray(run(*(part[order] for part in own)))
    np.testing.assert_array_equal(shuffled, whole[order])
    for mine, other in zip(own, others, strict=True):
        other[5:8] = mine[5:8]
    np.testing.assert_array_equal(np.asarray(run(*others))[5:8], whole[5:8])


@pytest.mark.parametrize(
    ("name", "tolerance"),  # activations are rounded to 16 bits, twice; with fp8 they are not
    [
        *((f"{form}_lanes", 2e-4) for form in ("int4", "int8", "q4_k", "fp4")),
        *((f"{form}_lanes", 2e-6) for form in ("fp8", "fp8_blocks")),
    ],
)
def test_native_experts_with_quantised_weights(name: str, tolerance: float) -> None:
    (args,) = cases.build(case(name), seed=0).args
    assert native.supports(args) is None
    found = np.asarray(jax.jit(native.experts)(args))
    by_rows = replace(case(name), lanes=False)
    expected = np.asarray(ref.experts(*cases.build(by_rows, seed=0).args))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "tolerance"), [("seven_experts", 2e-6), ("int4_lanes", 2e-4)], ids=["plain", "int4"]
)
@pytest.mark.parametrize(
    "activation",
    [
        Activation(limit=0.5, alpha=1.702, shift=1.0),
        Activation(limit=1.0, gate_limit=0.3),
        cases.GEGLU,
        cases.RELU2,
    ],
    ids=["limit", "two_limits", "geglu", "relu2"],
)
def test_activations_of_each_variant(
    variant: int, name: str, tolerance: float, activation: Activation
) -> None:
    one = replace(case(name), activation=activation)
    (args,) = cases.build(one, seed=0).args
    assert native.supports(args) is None
    found = np.asarray(jax.jit(native.experts)(args))
    expected = np.asarray(ref.experts(*cases.build(replace(one, lanes=False), seed=0).args))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.skipif(sys.platform != "linux", reason="pages come back zeroed on Linux")
@pytest.mark.parametrize("impl", ["native", "xla"])
def test_only_the_chosen_experts_are_read(impl: str) -> None:
    """Weights of zeros become resident where they are read."""
    outputs, width = 2048, 512  # 4 MB of gates and ups, 2 MB of downs: no less than a huge page
    gate_up = jnp.zeros((COUNT, outputs, width))
    down = jnp.zeros((COUNT, width, outputs // 2))
    choices = jnp.array([[1, 5], [5, 1]], jnp.int32)

    @jax.jit
    def run(gate_up: jax.Array, down: jax.Array) -> jax.Array:
        tokens = {"x": jnp.ones((2, width)), "choices": choices, "weights": jnp.ones((2, 2))}
        return experts(ExpertsArgs(**tokens, gate_up=gate_up, down=down), impl)

    run(gate_up, down).block_until_ready()
    for stack in (gate_up, down):
        release_zeros(stack.unsafe_buffer_pointer(), stack.nbytes)
    run(gate_up, down).block_until_ready()
    for stack in (gate_up, down):
        first, size = stack.unsafe_buffer_pointer(), stack.nbytes // COUNT
        read = [resident_pages(first + i * size, size) * mmap.PAGESIZE / size for i in range(COUNT)]
        assert min(read[1], read[5]) > 0.99
        assert read[3] < 0.01  # not next to a chosen one, with which it could share a huge page


def test_every_pair_is_in_one_tile_of_its_expert() -> None:
    rng = np.random.default_rng(0)
    for width, outside in ((1, False), (4, True), (16, True), (64, False)):
        choices = rng.integers(-2 if outside else 0, COUNT + 2 * outside, (T, CHOSEN), np.int32)
        made = jax.jit(tiles_of, static_argnums=(1, 2))(choices, COUNT, width)
        tiles = Tiles(*map(np.asarray, made))
        inside = (choices >= 0) & (choices < COUNT)
        number = len(tiles.expert)
        assert number == max_tiles(choices.size, COUNT, width)
        assert int(tiles.rows.sum()) == inside.sum()
        assert (tiles.place[~inside] == number * width).all()
        pairs = np.arange(choices.size).reshape(choices.shape)
        for pair, place in zip(pairs[inside], tiles.place[inside], strict=True):
            tile, row = divmod(int(place), width)
            assert tiles.pairs[tile, row] == pair and row < tiles.rows[tile]
            assert tiles.expert[tile] == choices.ravel()[pair]


def test_a_router_of_two_groups_by_hand() -> None:
    """Experts 0 and 1 have 5 and 1, 2 and 3 have 4 and 3.5: sums 6 and 7.5, the best 5 and 4."""
    x, w = jnp.ones((1, 1)), jnp.array([[5.0], [1.0], [4.0], [3.5]])
    sigmoid = 1 / (1 + np.exp(-np.array([5.0, 1.0, 4.0, 3.5])))
    expected = {"best": [0, 1], "best_two": [2, 3]}
    for score, experts_chosen in expected.items():
        routing = Routing(2, "sigmoid", True, 2.0, Groups(2, 1, score))  # type: ignore[arg-type]
        choices, weights = route(RouteArgs(x=x, w=w, routing=routing))
        assert choices.tolist() == [experts_chosen]
        own = sigmoid[experts_chosen]
        np.testing.assert_allclose(weights[0], 2 * own / own.sum(), rtol=1e-6)
    # a bias changes who is chosen, not the weights
    bias = jnp.array([0.0, 9.0, 0.0, 0.0])
    choices, weights = route(RouteArgs(x=x, w=w, routing=Routing(1, "sigmoid"), choice_bias=bias))
    assert choices.tolist() == [[1]]
    np.testing.assert_allclose(weights[0], sigmoid[[1]], rtol=1e-6)


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    choices, weights = route(RouteArgs(x=jnp.ones((2, 3)), w=jnp.zeros((5, 3)), routing=Routing(3)))
    assert choices.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 0.2)


def test_uniform_choices_are_uniform_distinct_and_of_the_token_alone() -> None:
    h = jax.random.normal(jax.random.key(0), (512, 16))
    same = jnp.tile(jnp.arange(8, dtype=jnp.int32), (512, 1))  # all tokens alike
    choices = np.asarray(jax.jit(shifted, static_argnums=2)(same, h, 128))
    assert all(len(set(row)) == 8 for row in choices.tolist())
    counts = np.bincount(choices.ravel(), minlength=128)
    assert counts.sum() == 4096 and counts.min() > 8 and counts.max() < 64  # 32 expected
    np.testing.assert_array_equal(shifted(same[5:6], h[5:6], 128), choices[5:6])


X, CHOICES, WEIGHTS = jnp.ones((2, D)), jnp.zeros((2, CHOSEN), jnp.int32), jnp.ones((2, CHOSEN))
GATE_UP, DOWN = jnp.ones((COUNT, 2 * F, D)), jnp.ones((COUNT, D, F))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": CHOICES[:1]}, "choices .1, 3. do not fit tokens .2, 64."),
        ({"choices": CHOICES.astype(jnp.int8)}, "choices are int8, not int32"),
        ({"weights": WEIGHTS[:, :2]}, "weights float32.2, 2. must be float32.2, 3."),
        ({"gate_up": GATE_UP[0]}, "are not stacks of matrices"),
        ({"gate_up": GATE_UP[:, :, 1:]}, "192 gates and ups of 63 inputs do not fit tokens"),
        ({"down": DOWN[:6]}, r"down is \(6, 64, 96\) instead of \(7, 64, 96\)"),
        ({"down": DOWN.astype(jnp.bfloat16)}, "weights are bfloat16 and tokens float32"),
        ({"down_bias": jnp.ones((COUNT, F))}, "down_bias .7, 96. does not fit 7 experts of 64"),
        ({"impl": "nope"}, "experts has no implementation 'nope'"),
    ],
)
def test_wrong_arguments_of_experts(change: dict[str, Any], message: str) -> None:
    tokens: dict[str, Any] = {"x": X, "choices": CHOICES, "weights": WEIGHTS}
    given = {**tokens, "gate_up": GATE_UP, "down": DOWN, **change}
    impl = given.pop("impl", None)
    with pytest.raises(ValueError, match=message):
        experts(ExpertsArgs(**given), impl)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing": Routing(6)}, "6 experts of a token are not within 1 to 5"),
        ({"routing": Routing(2, groups=Groups(3, 1, "best"))}, "3 groups do not divide 5 experts"),
        ({"w": jnp.zeros((5, 2))}, "tokens .2, 3. do not fit a router"),
        ({"bias": jnp.zeros(4)}, "bias .4,. does not fit 5 experts"),
        ({"is_token": jnp.ones(3, bool)}, "is_token .3,. does not fit 2 tokens"),
        ({"given": jnp.zeros((2, 3), jnp.int32)}, "experts int32.2, 3. are not int32.2, 2."),
        (
            {"routing": Routing(2, "sparsemixer"), "given": jnp.zeros((2, 2), jnp.int32)},
            "sparsemixer chooses the experts that it weighs",
        ),
    ],
)
def test_wrong_arguments_of_route(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"w": jnp.zeros((5, 3)), "routing": Routing(2)}
    with pytest.raises(ValueError, match=message):
        route(RouteArgs(x=jnp.ones((2, 3)), **given | change))


def test_given_experts_have_the_weights_of_their_scores_by_hand() -> None:
    """Scores of logits 2, -1 and 0.5 are the roots of their softplus; each choice is kept."""
    x, w = jnp.ones((1, 1)), jnp.array([[2.0], [-1.0], [0.5]])
    scores = np.sqrt(np.log1p(np.exp(np.array([2.0, -1.0, 0.5]))))
    routing, given = Routing(2, "sqrtsoftplus", True, 1.5), jnp.array([[1, 0]], jnp.int32)
    choices, weights = route(RouteArgs(x=x, w=w, routing=routing, given=given))
    assert choices.tolist() == [[1, 0]]
    expected = 1.5 * scores[[1, 0]] / scores[:2].sum()
    np.testing.assert_allclose(weights[0], expected, rtol=1e-6)


def test_gelu_by_a_sigmoid() -> None:
    """The kernels' form of GELU is that by tanh; bfloat16 would hide a difference."""
    gate = jnp.concatenate([jnp.linspace(-12, 12, 997), jnp.asarray([-1e9, 1e9, 0.0])])
    expected = 3 * jax.nn.gelu(gate, approximate=True)
    found = epilogues.geglu(gate, jnp.full(gate.shape, 3.0))
    np.testing.assert_allclose(found, expected, rtol=3e-6, atol=2e-6)
