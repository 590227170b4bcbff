"""Calls of Triton kernels without Triton's IR."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.toolchain.jax_internals import (
    OPAQUE,
    TRITON_CALL,
    attribute_of,
    custom_calls,
)
from pallas_kernels.toolchain.triton_text import drop_triton_text

X = jnp.ones(3)


def field(number: int, content: bytes | int) -> bytes:
    """One field of a protobuf message; contents are shorter than 16,384 bytes."""
    if isinstance(content, int):
        return bytes((number << 3, content))
    size = len(content)
    length = bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7))
    return bytes((number << 3 | 2,)) + length + content


def call(text: bytes | None, *, parameters: bytes) -> bytes:
    """A TritonAnyKernelCall with this text in its kernel."""
    kernel = field(1, b"name") + field(2, 4) + field(4, b"ptx" * 100)
    kernel += b"" if text is None else field(5, text)
    kernel += field(6, 90)
    fixed = bytes((7 << 3 | 5, 1, 2, 3, 4, 8 << 3 | 1, 1, 2, 3, 4, 5, 6, 7, 8))  # of other types
    inner = field(1, kernel) + field(2, 1) + field(5, parameters)  # the text's number, higher up
    return field(1, inner) + fixed + field(4, b"name")


def lowered(opaque: bytes, target: str) -> jax.stages.Lowered:
    out = jax.ShapeDtypeStruct(X.shape, X.dtype)

    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(target, out)(x, opaque=opaque, other="kept")

    return jax.jit(lambda x: layer(layer(x))).lower(X)


@pytest.mark.parametrize("text", [b"tt.func", b"tt.func" * 1000, None], ids=["short", "long", "no"])
def test_only_the_text_is_dropped(text: bytes | None) -> None:
    made = lowered(zlib.compress(call(text, parameters=b"grid" * 50)), TRITON_CALL)
    drop_triton_text(made.compiler_ir())
    module = made.compiler_ir()
    (found,) = custom_calls(module.operation, TRITON_CALL)
    assert zlib.decompress(attribute_of(found, OPAQUE)) == call(None, parameters=b"grid" * 50)
    assert attribute_of(found, "other") == b"kept"


def test_other_calls_are_left_alone() -> None:
    made = lowered(b"anything", "another_call")
    drop_triton_text(made.compiler_ir())
    (found,) = custom_calls(made.compiler_ir().operation, "another_call")
    assert attribute_of(found, OPAQUE) == b"anything"


def test_the_changed_module_is_compiled() -> None:
    """JAX compiles the module that ``compiler_ir`` returns."""
    made = lowered(b"", "before")
    for each in custom_calls(made.compiler_ir().operation, "before"):
        with made.compiler_ir().context:
            each.attributes["call_target_name"] = type(each.attributes["call_target_name"]).get(
                "after"
            )
    with pytest.raises(jax.errors.JaxRuntimeError, match="after"):
        made.compile()


def test_the_call_is_jax_triton_s() -> None:
    jax_triton = pytest.importorskip("jax_triton")
    assert jax_triton.CUSTOM_CALL_TARGET_NAME == TRITON_CALL


def test_the_field_is_jaxlib_s() -> None:
    """The path to the text is that of jaxlib's own message."""
    triton = pytest.importorskip("jax_cuda13_plugin._triton")
    kernel = triton.TritonKernel("name", 4, 1, 0, "the ptx", "the text", 90)
    made = lowered(
        zlib.compress(triton.TritonKernelCall(kernel, 1, 1, 1, []).to_proto("name", b"")),
        TRITON_CALL,
    )
    drop_triton_text(made.compiler_ir())
    (found,) = custom_calls(made.compiler_ir().operation, TRITON_CALL)
    left = zlib.decompress(attribute_of(found, OPAQUE))
    assert b"the ptx" in left
    assert b"the text" not in left
