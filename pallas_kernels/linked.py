"""What a kernel in Mosaic does to be linked with its neighbours, so that it begins early.

Kernels of one linked call (``link``) are launched with programmatic edges (CUDA's programmatic
dependent launch): one begins when every program of the kernel before has called
``let_next_begin`` and there is room on a multiprocessor, and waits for that kernel to end, all
before it included, in ``await_kernel_before``. Elsewhere, and in the first of them, both do
nothing.

Until it waits a kernel may read only what no kernel of a step writes beside it: weights, page
tables, lengths, and pages but for the slots that are written in this step. It may write nothing.
Every program waits, or what comes after it would not know that all before has ended. Owns: these
two. Must not know: which kernels are neighbours.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu


def let_next_begin() -> None:
    """The kernel after this one may begin, as far as this program goes."""
    plgpu.griddepcontrol_launch_dependents()


def await_kernel_before() -> None:
    """Until all that was launched before has ended and what it wrote can be read."""
    plgpu.griddepcontrol_wait()
