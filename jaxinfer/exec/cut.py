"""A step in two executables: the device runs the first while the host prepares the second.

Owns: ``CutStep``, how a traced step is cut. Where: behind what the pages of the first layers need.
Must not know: models, buckets, who compiles or calls the two.

The call of a prompt's step takes the host 1.3 ms from the batch's copy to the first kernel (1,024
tokens of Qwen3-4B, H200), nearly all of it for each argument and each kernel, and the device idles.
A quarter of the layers is a quarter of that, if the call names no other weights: 1 us for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

type Arrays = tuple[jax.Array, ...]


class WeightsOfParts(NamedTuple):
    """Which of a step's weights each part is given, as indices; some both."""

    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class CutStep:
    """The two functions of a step ``(weights, pages, *rest) -> (pages, ...)``.

    ``first``: (its weights, first pages, *rest) -> (first pages, carried).
    ``second``: (its weights, first pages, other pages, *rest, carried) -> (other pages, ...). It
    reads the first pages and does not return them.
    """

    first: Callable[..., tuple[Arrays, Arrays]]
    second: Callable[..., tuple[Any, ...]]
    carried: tuple[jax.ShapeDtypeStruct, ...]


def cut_step(traced: jax.stages.Traced, num_first: int, weights: WeightsOfParts) -> CutStep:
    """Cut a step behind what its first ``num_first`` pages need.

    The second makes again what follows from ``rest`` alone (positions, page tables, angles of
    the rotation): small, and a CUDA graph keeps a kernel only while its memory stays, which what is
    carried does not. ``ValueError`` for a step of which a part is there for its effect alone, and
    where a part needs a weight that is not among its own.
    """
    whole: Jaxpr = traced.jaxpr.jaxpr
    (all_weights, pages, *rest), _ = jax.tree.unflatten(traced.in_tree, whole.invars)
    first_pages, other_pages = pages[:num_first], pages[num_first:]
    made_pages, results = whole.outvars[:num_first], whole.outvars[num_first:]
    begun, wanted_first = _needed(whole.eqns, made_pages, given=())
    given = _made_of({*all_weights, *pages}, begun)
    ended, wanted = _needed(whole.eqns, results, given)
    kept = {id(eqn) for eqn in (*begun, *ended)}
    if any(eqn.effects and id(eqn) not in kept for eqn in whole.eqns):
        raise ValueError("a step is cut in two that has a part for its effect alone")
    seen = dict.fromkeys(var for eqn in begun for var in eqn.outvars if var in given)
    carried = [var for var in seen if var in wanted and var not in made_pages]

    flat_rest = jax.tree.leaves(rest)
    own_first, own_second = ([all_weights[i] for i in own] for own in weights)
    for needed, own in ((wanted_first, own_first), (wanted, own_second)):
        if needed.intersection(all_weights).difference(own):
            raise ValueError("a part of a step needs a weight of the other part's layers")
    inputs = [*own_first, *first_pages, *flat_rest]
    first = _part(traced.jaxpr, inputs, begun, [*made_pages, *carried])
    inputs = [*own_second, *made_pages, *other_pages, *flat_rest, *carried]
    second = _part(traced.jaxpr, inputs, ended, results)
    pages_out, *others = jax.tree.unflatten(
        jax.tree.structure(traced.out_info), range(len(whole.outvars))
    )
    tree = jax.tree.structure((pages_out[num_first:], *others))
    return CutStep(
        partial(_call_first, first, num_first),
        partial(_call_second, second, tree),
        tuple(_shape_of(var) for var in carried),
    )


def _call_first(part: ClosedJaxpr, num_first: int, *arguments: Any) -> tuple[Arrays, Arrays]:
    results = tuple(jaxpr_as_fun(part)(*jax.tree.leaves(arguments)))
    return results[:num_first], results[num_first:]


def _call_second(part: ClosedJaxpr, tree: Any, *arguments: Any) -> tuple[Any, ...]:
    results = jaxpr_as_fun(part)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(tree, results)  # type: ignore[no-any-return]


def _needed(
    eqns: Sequence[JaxprEqn], results: Iterable[Any], given: Collection[Var]
) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations that these results need, but for what is given; and all that is read."""
    wanted = _variables(results)
    found: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if any(var in wanted and var not in given for var in eqn.outvars):
            found.append(eqn)
            wanted |= _variables(eqn.invars)
    return found[::-1], wanted


def _made_of(sources: set[Var], eqns: Iterable[JaxprEqn]) -> set[Var]:
    """What of the results of these equations follows from the sources."""
    reached = set(sources)
    for eqn in eqns:
        if not reached.isdisjoint(_variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached - sources


def _shape_of(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _variables(atoms: Iterable[Any]) -> set[Var]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _part(
    whole: ClosedJaxpr, inputs: list[Var], eqns: list[JaxprEqn], results: Sequence[Any]
) -> ClosedJaxpr:
    info = whole.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = whole.jaxpr.replace(invars=inputs, outvars=results, eqns=eqns, debug_info=info)
    return ClosedJaxpr(part, whole.consts)
