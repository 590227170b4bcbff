"""A few tokens as integers of 16 bits, times packed weights, by the integer tensor cores.

With few tokens a kernel has no time to make every weight a floating-point number. Here a weight
stays the byte that a mask leaves of its packed word. A token's inputs are rounded to 16 bits in
chunks of 32 (16 where weights have groups of 16), each with one float32 unit, as the native kernel
does on a CPU: 2e-5 of a result. Their two bytes are two columns of operand B of mma.sync
(m16n8k32, or m16n8k16; "Matrix Fragments for mma.m16n8k32" of the PTX ISA), so 8 columns are four
tokens. With more, which would take a second instruction, weights made floating-point numbers are
faster: for 8 tokens the two GEMMs of Qwen3.5-35B-A3B's delta rule in int4 took 17.8 and 9.8 us on
an H200, 10.2 and 5.2 without integers. The registers of A have the rows and inputs that ``arrange``
puts in a word, in another order of the 16 inputs, which the tokens follow.

A result is float32[64, 8] in wgmma's layout, but column 2 t is token t, and others are not used.

JAX's interpreter cannot run what is here: tests replace ``put`` and ``multiply``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.fragments import THREADS, assembly, element, load_words
from pallas_kernels.residual_norm.token import span_layout

type Ref = Any
type Value = Any  # of MLIR

COLUMNS = 8  # of operand B
LARGEST = 127 * 256  # of a rounded input
SMALLEST = 1e-30  # unit of a chunk of zeros
ROUNDING = 1.5 * 2.0**23  # added to a float32, it leaves an integer in the lowest bits
# To read these bits, another one is added. (Without a one, ptxas converts the sum to a byte.)
READING, READING_BITS = ROUNDING + 1, 0x4B400001
LANES, ROWS = 32, 16  # of a warp


class Factors(NamedTuple):
    """The factors of a group's outputs, refs [64] each; None where the form has none."""

    scale: Ref
    zero: Ref
    offset: Ref


class RecordedFactors(NamedTuple):
    """The factors of consecutive groups of a record (``records``): int32[64] refs of words."""

    count: int  # of groups
    signed: bool  # scales
    scales: Sequence[Ref]  # words of four groups each
    offsets: Sequence[Ref]  # empty without
    supers: Ref
    skipped: jax.Array | None  # int32: groups in the first word before those; None: 0


def whole_numbers(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # [R, chunk]
    """The inputs of chunks as integers in float32, the unit of each chunk, and the sum of its
    rounded inputs, float32[R] each.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(wide).max(axis=1), SMALLEST)
    scaled = wide * lax.broadcast_in_dim(LARGEST / largest, wide.shape, [0])
    whole = (scaled + ROUNDING) - ROUNDING
    unit = largest * (1.0 / LARGEST)
    return whole, unit, whole.sum(axis=1) * unit


def put(
    whole: jax.Array,  # float32[R, chunk] in the layout of ``token.span_layout``
    target: Ref,  # int8[R, 8, 4, chunk / 4] in shared memory
    token: int,
) -> None:
    """Write the bytes of a token's inputs where threads load them as operand B."""
    rows, chunk = whole.shape
    layout = span_layout(chunk)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_: Any, array: Any, smem: Any) -> None:
        byte = ir.IntegerType.get_signless(8)
        flat = mgpu.memref_fold(smem, 0, len(smem.type.shape))
        warp, lane = _warp_and_lane()
        per_row = chunk // 4  # lanes of a row, and bytes of a column's lane
        row = _add(_mul(warp, rows // 4), arith.divui(lane, _index(per_row)))
        quarter = arith.remui(lane, _index(per_row))  # four consecutive inputs
        block = arith.divui(quarter, _index(4))
        pair = arith.divui(arith.remui(quarter, _index(4)), _index(2))
        first_lane = _mul(arith.remui(quarter, _index(2)), 2)
        start = _add(_mul(row, COLUMNS * chunk), _index(2 * token * chunk))
        start = _add(start, _add(_add(_mul(first_lane, per_row), _mul(block, 4)), pair))
        (register,) = array.registers.flat
        for i in range(4):
            value = element(register, i)
            value = arith.addf(value, _float(READING))
            value = arith.subi(arith.bitcast(_i32(), value), _int(READING_BITS))
            high = arith.shrsi(arith.addi(value, _int(128)), _int(8))
            at = _add(start, _index((i // 2) * per_row + 2 * (i % 2)))
            memref.store(arith.trunci(byte, high), flat, [at])
            memref.store(arith.trunci(byte, value), flat, [_add(at, _index(chunk))])

    run: Any = store
    run(whole, target)


def multiply(
    kind: str,  # of the weights: int4 or int8
    tiles: Sequence[Ref],  # packed weights [64, 64] of consecutive inputs
    factors: Sequence[Factors] | RecordedFactors,  # of consecutive groups
    tokens: Ref,  # of the chunks: int8[chunks, 8, 4, chunk / 4], see ``put``
    units: tuple[Ref, Ref],  # and of tokens: units and sums, float32[4, chunks] each
    total: jax.Array,  # float32[64, 8]
) -> jax.Array:
    """The total plus the products of tiles and tokens."""
    words = [load_words(tile) for tile in tiles]
    recorded = factors if isinstance(factors, RecordedFactors) else None
    own: Any = tuple(factors) if recorded is None else recorded[2:5]
    shifts = []
    if recorded is not None and recorded.skipped is not None:
        shifts = [lax.broadcast_in_dim(8 * recorded.skipped, (TILE,), [])]
    refs = jax.tree.leaves((own, tokens, units), is_leaf=lambda x: x is None)
    given = [ref for ref in refs if ref is not None]
    strided = plgpu.Layout.WG_STRIDED(words[0].shape, 4)
    result = plgpu.ShapeDtypeStruct((TILE, COLUMNS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(
            *(strided,) * len(words),
            *(plgpu.Layout.WG_SPLAT((TILE,)),) * len(shifts),
            *(plgpu.RefType(),) * len(given),
            plgpu.Layout.WGMMA,
        ),
        return_type=result,
    )
    def add(_: Any, *arrays: Any) -> Any:
        first = len(words) + len(shifts)
        loaded, found = arrays[: len(words)], iter(arrays[first:-1])
        some, *rest = _like((own, tokens, units), found)
        table: Any = _Table(kind, some)
        if recorded is not None:
            shift = arrays[len(words)].registers.flat[0] if shifts else None
            table = _RecordedTable(recorded, some, shift)
        sums = _Work(kind, table, *rest).totals(loaded)
        before = arrays[-1]
        registers = np.empty_like(before.registers)
        pair = ir.VectorType.get((2,), _f32())
        flat, old = registers.reshape(2), before.registers.reshape(2)
        for half in range(2):
            value = arith.addf(element(old[half], 0), sums[half])
            flat[half] = vector.from_elements(pair, [value, element(old[half], 1)])
        return mgpu.FragmentedArray(_registers=registers, _layout=before.layout, _is_signed=None)

    run: Any = add
    return run(*words, *shifts, *given, total)


def _like(tree: Any, values: Iterator[Any]) -> Any:
    """A tree of nested tuples with the values in place of its leaves that are not None."""
    if tree is None:
        return None
    if isinstance(tree, tuple | list):
        made = [_like(one, values) for one in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return next(values)


class _Table:
    """The factors of groups, by arrays of each kind."""

    def __init__(self, kind: str, factors: Sequence[Factors]) -> None:
        self.kind, self.factors, self.count = kind, factors, len(factors)

    def of_group(self, group: int, row: Value) -> tuple[Value, Value | None, Value | None]:
        """Scale, zero and offset of a row."""
        factors = self.factors[group]
        scale = _float_at(factors.scale, row)
        zero = None if factors.zero is None else _float_at(factors.zero, row)
        if self.kind == "int4" and factors.zero is None and factors.offset is None:
            zero = _float(8.0)
        offset = None if factors.offset is None else _float_at(factors.offset, row)
        return scale, zero, offset

    def supers(self, row: Value) -> None:
        """There are none."""


class _RecordedTable:
    """The factors of groups of a record; each word is loaded once for four groups."""

    def __init__(
        self, factors: RecordedFactors, refs: tuple[Any, Any, Any], shift: Value | None
    ) -> None:
        self.count, self.signed, self.shift = factors.count, factors.signed, shift
        self.scales, self.offsets, self.pairs = refs
        self.zero = None
        self.words = dict[tuple[str, int, Value], Value]()

    def of_group(self, group: int, row: Value) -> tuple[Value, Value | None, Value | None]:
        """See ``_Table``."""
        scale = self._byte("scales", group, row, signed=self.signed)
        offset = self._byte("offsets", group, row, signed=self.signed) if self.offsets else None
        return scale, None, offset

    def supers(self, row: Value) -> list[Value]:
        """The factors of a row's scales and offsets."""
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        one = ir.VectorType.get((1,), _i32())
        halves = vector.bitcast(pair, vector.from_elements(one, [_loaded(self.pairs, row)]))
        return [arith.extf(_f32(), element(halves, i)) for i in range(2)]

    def _byte(self, kind: str, group: int, row: Value, *, signed: bool) -> Value:
        """A byte of the words as float32: a byte in the lowest bits of 2 ** 23 is that much more.

        That takes a permutation and a sum; a conversion of integers is slower than both.
        """
        place = kind, group // 4, row
        if place not in self.words:
            word = _loaded(getattr(self, kind)[group // 4], row)
            word = word if self.shift is None else arith.shrui(word, self.shift)
            self.words[place] = arith.xori(word, _int(-0x7F7F7F80)) if signed else word
        bits = _permuted(self.words[place], _int(0x4B000000), 0x7650 | group % 4)
        return arith.subf(arith.bitcast(_f32(), bits), _float(2.0**23 + 128 * signed))


class _Work:
    """The code of a thread for some tiles: rows g and g + 8 of its warp."""

    def __init__(
        self,
        kind: str,
        factors: _Table | _RecordedTable,
        tokens: Value,
        units: tuple[Value, Value],
    ) -> None:
        self.kind, self.factors = kind, factors
        self.num_chunks, *_, quarter = tokens.type.shape
        self.chunk, self.tokens = 4 * quarter, mgpu.memref_fold(tokens, 0, 4)
        warp, lane = _warp_and_lane()
        self.lane = arith.remui(lane, _index(4))
        self.column = arith.divui(lane, _index(4))
        row = _add(_mul(warp, ROWS), self.column)
        self.rows = (row, _add(row, _index(8)))
        self.units, self.sums = (self._row_of(ref) for ref in units)

    def totals(self, tiles: Sequence[Any]) -> dict[int, Value]:
        """The products by half of the rows."""
        sums, minima = dict[int, Value](), dict[int, Value]()
        per_group = self.num_chunks // self.factors.count
        per_tile = self.num_chunks // len(tiles)
        for group in range(self.factors.count):
            loaded = [self.factors.of_group(group, row) for row in self.rows]
            for chunk in range(group * per_group, (group + 1) * per_group):
                tile, index = divmod(chunk, per_tile)
                operand = self._operand(tiles[tile], index)
                unit, total = self.units[chunk], self.sums[chunk]
                for half, product in enumerate(self._products(operand, chunk)):
                    scale, zero, offset = loaded[half]
                    value = arith.mulf(product, unit)
                    if zero is not None:
                        value = _fma(arith.negf(zero), total, value)
                    sums[half] = _fma(scale, value, sums.get(half))
                    if offset is not None:
                        minima[half] = _fma(offset, total, minima.get(half))
        for half, row in enumerate(self.rows):
            supers = self.factors.supers(row)
            if supers is not None:
                sums[half] = arith.mulf(sums[half], supers[0])
            if minima:
                large = None if supers is None else supers[1]
                more = minima[half]
                sums[half] = (
                    arith.addf(sums[half], more) if large is None else _fma(large, more, sums[half])
                )
        return sums

    def _row_of(self, ref: Value) -> list[Value]:
        """The values of the thread's token, one for each chunk."""
        found: list[Value] = []
        for first in range(0, self.num_chunks, 4):
            count = min(4, self.num_chunks - first)
            kind = ir.VectorType.get((count,), _f32())
            some = vector.load(kind, ref, [self.lane, _index(first)], alignment=4 * count)
            for i in range(count):
                found.append(element(some, i))
        return found

    def _operand(self, tile: Any, index: int) -> list[Value]:
        """Operand A of a chunk of a tile: registers of rows g and g + 8, in turn, for 16 inputs."""
        words: list[Value] = []
        for register in tile.registers.flat:
            one = ir.VectorType.get((1,), _i32())
            for i in range(register.type.shape[0]):
                taken = vector.extract_strided_slice(one, register, [i], [1], [1])
                words.append(element(taken, 0))
        blocks = self.chunk // 16
        found: list[Value] = []
        for block in range(index * blocks, (index + 1) * blocks):
            if self.kind == "int4":
                word = words[block]
                found += [
                    arith.andi(word, _int(0x0F0F0F0F)),
                    arith.andi(arith.shrui(word, _int(4)), _int(0x0F0F0F0F)),
                ]
            else:  # stored with the highest bit inverted
                first, second = words[2 * block : 2 * block + 2]
                permuted = (_permuted(first, second, selector) for selector in (0x6240, 0x7351))
                found += [arith.xori(one, _int(-0x7F7F7F80)) for one in permuted]
        return found

    def _products(self, operand: Sequence[Value], chunk: int) -> list[Value]:
        """The products of a chunk and the thread's token, float32 in units, by half."""
        lanes = _add(_mul(self.column, 4), self.lane)
        start = chunk * COLUMNS * self.chunk
        at = _add(_mul(lanes, self.chunk // 4), _index(start))
        kind = ir.VectorType.get((self.chunk // 4,), ir.IntegerType.get_signless(8))
        loaded = vector.load(kind, self.tokens, [at], alignment=self.chunk // 4)
        count = self.chunk // 16
        loaded = vector.bitcast(ir.VectorType.get((count,), _i32()), loaded)
        bytes_ = [element(loaded, i) for i in range(count)]
        sums = _mma(operand, bytes_)
        products = []
        for high, low in (sums[:2], sums[2:]):
            whole = arith.addi(arith.shli(high, _int(8)), low)
            products.append(arith.sitofp(_f32(), whole))
        return products


def _mma(a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """mma.sync of one warp from zero: four int32, of row g two columns, then of row g + 8."""
    depth = 16 * len(b)
    names = [f"${i}" for i in range(5 + len(a) + len(b))]
    first, last = 4, 4 + len(a)
    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.s32.s8.s8.s32 {{{', '.join(names[:4])}}}, "
        f"{{{', '.join(names[first:last])}}}, {{{', '.join(names[last : last + len(b)])}}}, "
        f"{{{', '.join([names[-1]] * 4)}}};"
    )
    constraints = ",".join(["=r"] * 4 + ["r"] * (len(a) + len(b) + 1))
    found = assembly(text, constraints, [*a, *b, _int(0)], "!llvm.struct<(i32, i32, i32, i32)>")
    return [
        ir.Operation.create(
            "llvm.extractvalue",
            results=[_i32()],
            operands=[found],
            attributes={"position": ir.DenseI64ArrayAttr.get([i])},
        ).result
        for i in range(4)
    ]


def _permuted(a: Value, b: Value, selector: int) -> Value:
    """prmt: four of the eight bytes of two words."""
    return assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, _int(selector)], "i32")


def _loaded(ref: Value, row: Value) -> Value:
    """An element of a ref [64]."""
    return memref.load(mgpu.memref_fold(ref, 0, len(ref.type.shape)), [row])


def _float_at(ref: Value, row: Value) -> Value:
    """An element of a ref [64] as float32; integers are not negative."""
    value = _loaded(ref, row)
    if isinstance(value.type, ir.F32Type):
        return value
    if isinstance(value.type, ir.IntegerType):
        return arith.sitofp(_f32(), arith.extui(_i32(), value))
    return arith.extf(_f32(), value)


def _warp_and_lane() -> tuple[Value, Value]:
    """The thread's warp of its warpgroup, and its place in it."""
    index = ir.IndexType.get()
    thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), _index(THREADS))
    return arith.divui(thread, _index(LANES)), arith.remui(thread, _index(LANES))


def _fma(a: Value, b: Value, c: Value | None) -> Value:
    contract = arith.FastMathFlags.contract
    product = arith.mulf(a, b, fastmath=contract)
    return product if c is None else arith.addf(product, c, fastmath=contract)


def _add(a: Value, b: Value) -> Value:
    return arith.addi(a, b)


def _mul(a: Value, factor: int) -> Value:
    return arith.muli(a, _index(factor))


def _index(value: int) -> Value:
    return mgpu.c(value, ir.IndexType.get())


def _int(value: int) -> Value:
    return mgpu.c(value, _i32())


def _float(value: float) -> Value:
    return mgpu.c(value, _f32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _f32() -> Any:
    return ir.F32Type.get()
