"""Programmatic dependent launch (PDL): a Mosaic kernel starts before the previous one has ended.

Kernels of one linked call (``toolchain.link``) are launched with programmatic edges: a kernel
starts when every CTA of the previous one has called ``launch_dependents`` and an SM has free
resources, and blocks in ``grid_dependency_wait`` until that kernel and all earlier ones have ended.
In the first kernel of a linked call, and in a kernel that is not linked, both do nothing.

Before it waits, a kernel may read only what no kernel of a step writes at the same time: weights,
page tables, lengths, and pages except the slots that this step writes. It may write nothing. Every
CTA must wait; otherwise later kernels could start before earlier ones have ended.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu


def launch_dependents() -> None:
    """Allow the next kernel to start once every CTA of this one has called this."""
    plgpu.griddepcontrol_launch_dependents()


def grid_dependency_wait() -> None:
    """Wait until all earlier kernels have ended and their results can be read."""
    plgpu.griddepcontrol_wait()
