"""A few tokens as integers of 16 bits, times packed weights, by the integer tensor cores.

With few tokens a kernel has no time to make every weight a floating-point number. Here a weight
stays the byte that a mask leaves of its packed word. A token's inputs are rounded to 16 bits, those
of a *unit* of 128 (64 if a warpgroup has no more) with one float32 factor: 2e-5 of a result. Their
two bytes are two columns of operand B of mma.sync (m16n8k32, or m16n8k16 where groups have 16
inputs; "Matrix Fragments for mma.m16n8k32" of the PTX ISA), so 8 columns are four tokens. The sums
stay integers until the end of a group, with integer scales (records) until that of a unit: for 256
inputs the loop of Q4_K had 52 loads and 48 conversions where each 32 inputs had a unit of their own
and factors were bytes; it has 25 and 12.

With more tokens, which would take a second instruction, weights made floating-point numbers are
faster: for 8 tokens the two GEMMs of Qwen3.5-35B-A3B's delta rule in int4 took 17.8 and 9.8 us on
an H200, 10.2 and 5.2 without integers. The registers of A have the rows and inputs that ``arrange``
puts in a word, in another order of the 16 inputs, which the tokens follow. Of int4 the rows g + 8
are the high halves of bytes, so their products are 16 times as large.

A result is float32[64, 8] in wgmma's layout, but column 2 t is token t, and others are not used.

JAX's interpreter cannot run what is here: tests replace ``put`` and ``multiply``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
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
SMALLEST = 1e-30  # factor of a unit of zeros
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


def whole_numbers(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [R, unit]
    """The inputs of units as integers in float32, and the factor of each unit, float32[R]."""
    wide = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(wide).max(axis=1), SMALLEST)
    scaled = wide * lax.broadcast_in_dim(LARGEST / largest, wide.shape, [0])
    return (scaled + ROUNDING) - ROUNDING, largest * (1.0 / LARGEST)


def put(
    whole: jax.Array,  # float32[R, unit] in the layout of ``token.span_layout``
    target: Ref,  # int8[chunks, 8, 4, chunk / 4] in shared memory
    totals: Ref,  # int32[chunks]
    token: int,
) -> None:
    """Write the bytes of a token's inputs where threads load them as operand B, and the sum of each
    chunk.
    """

    @plgpu.inline_mgpu(
        arg_types=(span_layout(whole.shape[1]), plgpu.RefType(), plgpu.RefType()),
    )
    def store(_: Any, array: Any, smem: Any, sums: Any) -> None:
        (register,) = array.registers.flat
        _store(register, smem, sums, token)

    run: Any = store
    run(whole, target, totals)


def _store(register: Value, smem: Value, sums: Value, token: int) -> None:
    """See ``put``: a thread has four consecutive inputs."""
    byte, chunk = ir.IntegerType.get_signless(8), 4 * smem.type.shape[3]
    flat = mgpu.memref_fold(smem, 0, len(smem.type.shape))
    warp, lane = _warp_and_lane()
    per_row = chunk // 4  # lanes of a chunk, and bytes of a column's lane
    row = _add(_mul(warp, LANES // per_row), arith.divui(lane, _index(per_row)))
    quarter = arith.remui(lane, _index(per_row))  # four consecutive inputs
    block = arith.divui(quarter, _index(4))
    pair = arith.divui(arith.remui(quarter, _index(4)), _index(2))
    first_lane = _mul(arith.remui(quarter, _index(2)), 2)
    start = _add(_mul(row, COLUMNS * chunk), _index(2 * token * chunk))
    start = _add(start, _add(_add(_mul(first_lane, per_row), _mul(block, 4)), pair))
    total = None
    for i in range(4):
        value = arith.addf(element(register, i), _float(READING))
        value = arith.subi(arith.bitcast(_i32(), value), _int(READING_BITS))
        total = value if total is None else arith.addi(total, value)
        high = arith.shrsi(arith.addi(value, _int(128)), _int(8))
        at = _add(start, _index((i // 2) * per_row + 2 * (i % 2)))
        memref.store(arith.trunci(byte, high), flat, [at])
        memref.store(arith.trunci(byte, value), flat, [_add(at, _index(chunk))])
    distance = 1
    while distance < per_row:
        total = arith.addi(total, _exchanged(total, distance))
        distance *= 2
    memref.store(total, sums, [row])  # by all threads of the chunk


def multiply(
    kind: str,  # of the weights: int4 or int8
    tiles: Sequence[Ref],  # packed weights [64, 64] of consecutive inputs
    factors: Sequence[Factors] | RecordedFactors,  # of consecutive groups
    tokens: Ref,  # of the chunks: int8[chunks, 8, 4, chunk / 4], see ``put``
    units: Ref,  # and of tokens: the factors of units, float32[4, units]
    totals: Ref,  # and the sums of chunks, int32[4, chunks]
    total: jax.Array,  # float32[64, 8]
) -> jax.Array:
    """The total plus the products of tiles and tokens."""
    words = [load_words(tile) for tile in tiles]
    recorded = factors if isinstance(factors, RecordedFactors) else None
    own: Any = tuple(factors) if recorded is None else recorded[2:5]
    shifts = []
    if recorded is not None and recorded.skipped is not None:
        shifts = [lax.broadcast_in_dim(8 * recorded.skipped, (TILE,), [])]
    refs = jax.tree.leaves((own, tokens, units, totals), is_leaf=lambda x: x is None)
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
        some, *rest = _like((own, tokens, units, totals), found)
        table: Any = _Table(kind, some)
        if recorded is not None:
            shift = arrays[len(words)].registers.flat[0] if shifts else None
            table = _RecordedTable(recorded, some, shift)
        sums = _Work(kind, table, *rest).result(loaded)
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
    """The factors of groups, by arrays of each kind, and the sums of a row's products with them."""

    def __init__(self, kind: str, factors: Sequence[Factors]) -> None:
        self.kind, self.factors, self.count = kind, factors, len(factors)
        self.loaded = dict[tuple[int, Value], tuple[Value, Value | None, Value | None]]()

    def products(
        self,
        parts: Sequence[tuple[int, Value, Value, Value]],  # group, high and low product, total
        row: Value,
        shift: int,
    ) -> tuple[Value, Value | None]:
        """The sum of a unit's products times their scales, and that of offsets, float32 in units;
        parts have inputs of one group. ``shift``: products are of values times two to its power.
        """
        found = minimum = None
        for group, high, low, total in parts:
            scale, zero, offset = self._of_group(group, row)
            whole = arith.addi(arith.shli(high, _int(8)), low)
            if self.kind == "int4" and zero is None and offset is None:
                whole = arith.subi(whole, arith.shli(total, _int(3 + shift)))  # minus 8
            value = arith.sitofp(_f32(), whole)
            if zero is not None:
                shifted = arith.shli(total, _int(shift)) if shift else total
                value = _fma(arith.negf(zero), arith.sitofp(_f32(), shifted), value)
            found = _fma(scale, value, found)
            if offset is not None:
                minimum = _fma(offset, arith.sitofp(_f32(), total), minimum)
        return found, minimum

    def supers(self, row: Value) -> None:
        """There are none."""

    def _of_group(self, group: int, row: Value) -> tuple[Value, Value | None, Value | None]:
        """Scale, zero and offset of a row."""
        if (group, row) not in self.loaded:
            given = self.factors[group]
            zero, offset = (
                None if ref is None else _float_at(ref, row) for ref in (given.zero, given.offset)
            )
            self.loaded[group, row] = _float_at(given.scale, row), zero, offset
        return self.loaded[group, row]


class _RecordedTable:
    """The same of a record; a word is loaded once for four groups, and scales are integers."""

    def __init__(
        self, factors: RecordedFactors, refs: tuple[Any, Any, Any], shift: Value | None
    ) -> None:
        self.count, self.signed, self.shift = factors.count, factors.signed, shift
        self.scales, self.offsets, self.pairs = refs
        self.words = dict[tuple[str, int, Value], Value]()

    def products(
        self, parts: Sequence[tuple[int, Value, Value, Value]], row: Value, shift: int
    ) -> tuple[Value, Value | None]:
        """See ``_Table``. 128 bytes of inputs times two bytes are less than 2 ** 31, and so are 128
        inputs times a byte.
        """
        del shift
        highs = lows = minimum = None
        for group, high, low, total in parts:
            scale = self._byte("scales", group, row)
            highs, lows = _plus_product(scale, high, highs), _plus_product(scale, low, lows)
            if self.offsets:
                minimum = _plus_product(self._byte("offsets", group, row), total, minimum)
        value = _fma(arith.sitofp(_f32(), highs), _float(256.0), arith.sitofp(_f32(), lows))
        return value, None if minimum is None else arith.sitofp(_f32(), minimum)

    def supers(self, row: Value) -> list[Value]:
        """The factors of a row's scales and offsets."""
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        one = ir.VectorType.get((1,), _i32())
        halves = vector.bitcast(pair, vector.from_elements(one, [_loaded(self.pairs, row)]))
        return [arith.extf(_f32(), element(halves, i)) for i in range(2)]

    def _byte(self, kind: str, group: int, row: Value) -> Value:
        """A byte of the words as an integer."""
        index, byte = divmod(group, 4)
        place = kind, index, row
        if place not in self.words:
            word = _loaded(getattr(self, kind)[index], row)
            self.words[place] = word if self.shift is None else arith.shrui(word, self.shift)
        others = 8 + byte if self.signed else 4  # copies of the byte's sign, or zeros
        return _permuted(self.words[place], _int(0), 0x1110 * others + byte)


class _Work:
    """The code of a thread for some tiles: rows g and g + 8 of its warp."""

    def __init__(
        self,
        kind: str,
        factors: _Table | _RecordedTable,
        tokens: Value,
        units: Value,
        totals: Value,
    ) -> None:
        self.kind, self.factors = kind, factors
        self.num_chunks, *_, quarter = tokens.type.shape
        self.chunk, self.tokens = 4 * quarter, mgpu.memref_fold(tokens, 0, 4)
        warp, lane = _warp_and_lane()
        self.lane = arith.remui(lane, _index(4))
        self.column = arith.divui(lane, _index(4))
        row = _add(_mul(warp, ROWS), self.column)
        self.rows = (row, _add(row, _index(8)))
        self.shifts = (0, 4) if kind == "int4" else (0, 0)  # of rows in the high half of bytes
        self.units = self._row_of(units, _f32())
        self.totals = self._row_of(totals, _i32())

    def result(self, tiles: Sequence[Any]) -> list[Value]:
        """The products by half of the rows."""
        sums: list[Value] = [None, None]
        minima: list[Value] = [None, None]
        per_unit = self.num_chunks // len(self.units)
        for number, unit in enumerate(self.units):
            chunks = range(number * per_unit, (number + 1) * per_unit)
            found = list(self._parts(tiles, chunks))
            for half, row in enumerate(self.rows):
                parts = [(group, *products[half], total) for group, products, total in found]
                value, minimum = self.factors.products(parts, row, self.shifts[half])
                sums[half] = _fma(value, unit, sums[half])
                if minimum is not None:
                    minima[half] = _fma(minimum, unit, minima[half])
        for half, row in enumerate(self.rows):
            large = self.factors.supers(row)
            if large is not None:
                sums[half] = arith.mulf(sums[half], large[0])
            if shift := self.shifts[half]:
                sums[half] = arith.mulf(sums[half], _float(2.0**-shift))
            if minima[half] is not None:
                last = _float(1.0) if large is None else large[1]
                sums[half] = _fma(last, minima[half], sums[half])
        return sums

    def _parts(
        self, tiles: Sequence[Any], chunks: range
    ) -> Iterator[tuple[int, list[tuple[Value, Value]], Value]]:
        """For the consecutive chunks of each group its number, the products of the high and the low
        bytes by half of the rows, and the sum of the inputs.
        """
        per_group = self.num_chunks // self.factors.count
        per_tile = self.num_chunks // len(tiles)
        for group, own in groupby(chunks, lambda chunk: chunk // per_group):
            sums, total = None, None
            for chunk in own:
                tile, index = divmod(chunk, per_tile)
                a = self._operand(tiles[tile], index)
                sums = _mma("u8" if self.kind == "int4" else "s8", a, self._inputs(chunk), sums)
                one = self.totals[chunk]
                total = one if total is None else arith.addi(total, one)
            assert sums is not None
            yield group, [(sums[0], sums[1]), (sums[2], sums[3])], total

    def _row_of(self, ref: Value, kind: Any) -> list[Value]:
        """The values of the thread's token."""
        found: list[Value] = []
        size = ref.type.shape[1]
        for first in range(0, size, 4):
            count = min(4, size - first)
            some = ir.VectorType.get((count,), kind)
            loaded = vector.load(some, ref, [self.lane, _index(first)], alignment=4 * count)
            found += [element(loaded, i) for i in range(count)]
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
                found += [arith.andi(word, _int(mask)) for mask in (0x0F0F0F0F, -0x0F0F0F10)]
            else:  # stored with the highest bit inverted
                first, second = words[2 * block : 2 * block + 2]
                permuted = (_permuted(first, second, selector) for selector in (0x6240, 0x7351))
                found += [arith.xori(one, _int(-0x7F7F7F80)) for one in permuted]
        return found

    def _inputs(self, chunk: int) -> list[Value]:
        """Operand B of a chunk."""
        lanes = _add(_mul(self.column, 4), self.lane)
        start = chunk * COLUMNS * self.chunk
        at = _add(_mul(lanes, self.chunk // 4), _index(start))
        kind = ir.VectorType.get((self.chunk // 4,), ir.IntegerType.get_signless(8))
        loaded = vector.load(kind, self.tokens, [at], alignment=self.chunk // 4)
        count = self.chunk // 16
        loaded = vector.bitcast(ir.VectorType.get((count,), _i32()), loaded)
        return [element(loaded, i) for i in range(count)]


def _mma(
    kind: str, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value] | None
) -> list[Value]:
    """mma.sync of one warp, plus ``c``: four int32, of row g two columns, then of row g + 8."""
    depth, added = 16 * len(b), [_int(0)] if c is None else list(c)
    names = [f"${i}" for i in range(4 + len(a) + len(b) + len(added))]
    first, last, end = 4, 4 + len(a), 4 + len(a) + len(b)
    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.s32.{kind}.s8.s32 {{{', '.join(names[:4])}}}, "
        f"{{{', '.join(names[first:last])}}}, {{{', '.join(names[last:end])}}}, "
        f"{{{', '.join((names[end:] * 4)[:4])}}};"
    )
    constraints = ",".join(["=r"] * 4 + ["r"] * (len(a) + len(b) + len(added)))
    found = assembly(text, constraints, [*a, *b, *added], "!llvm.struct<(i32, i32, i32, i32)>")
    return [_extracted(found, i) for i in range(4)]


def _extracted(struct: Value, index: int) -> Value:
    """An int32 of a struct."""
    return ir.Operation.create(
        "llvm.extractvalue",
        results=[_i32()],
        operands=[struct],
        attributes={"position": ir.DenseI64ArrayAttr.get([index])},
    ).result


def _exchanged(value: Value, distance: int) -> Value:
    """The value of the thread whose number in the warp differs in the bit ``distance``."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    return assembly(text, "=r,r", [value], "i32")


def _plus_product(a: Value, b: Value, total: Value | None) -> Value:
    """An integer product, added to the total."""
    product = arith.muli(a, b)
    return product if total is None else arith.addi(total, product)


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
