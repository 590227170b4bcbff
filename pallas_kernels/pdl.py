"""Programmatic dependent launch (PDL): how a Mosaic kernel begins before the previous one ends.

Kernels of one linked call (``toolchain.link``) are launched with programmatic edges: a kernel
begins when every CTA of the previous one has called ``let_next_begin`` and an SM has room, and
waits in ``await_kernel_before`` until that kernel and all before it have ended. In the first kernel
of a linked call, and in one that is not linked, both do nothing.

Before it waits, a kernel may read only what no kernel of a step writes at the same time: weights,
page tables, lengths, and pages except the slots that this step writes. It may write nothing. Every
CTA must wait; otherwise the kernels after it could begin before earlier ones have ended.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu


def let_next_begin() -> None:
    """Allow the next kernel to begin, as far as this CTA is concerned."""
    plgpu.griddepcontrol_launch_dependents()


def await_kernel_before() -> None:
    """Wait until all earlier kernels have ended and their results can be read."""
    plgpu.griddepcontrol_wait()
