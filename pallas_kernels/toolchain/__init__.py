"""Compiles the kernels of traced steps ahead of XLA. A step works without it, later and slower.

``api.Toolchain`` is all that an engine uses. ``kernel_call.call_lowered`` is all that an op uses,
through ``registry.imported_when_called``.

    find            the kernels in a trace, and how to compile one in Triton
    kernel_call     a Mosaic kernel as a primitive: lowered once for all executables of a process
    pool, worker    processes that lower and compile Mosaic kernels
    machine_code    a Mosaic kernel compiled in one process and loaded in another
    link*           neighbouring Mosaic kernels as one custom call, in which each may begin early:
                    which calls (link), their modules (link_modules), launch code (link_host)
    triton_text     drops Triton's IR from the calls of its kernels
    torch_hidden    keeps Triton from importing PyTorch

It is written for jax and jaxlib 0.11.2, jax-triton 0.4.1 and Triton 3.7, which pyproject.toml pins.
What it knows of JAX beyond the documented API is in ``jax_internals``, but for formats, each of
which is read in one place:

    link_modules, link_host   how Mosaic lays out a kernel's module and launches it: ``gpu.launch``
                              in one ``func.func``, ``mosaic_gpu_launch_kernel``, the CUDA driver's
                              functions that Mosaic's runtime exports (jaxlib/mosaic/gpu)
    machine_code              Mosaic keeps what it has compiled by ``kernel_hash``, for a process,
                              and fills that cache from an executable that is loaded, too
                              (custom_call.cc); an NVIDIA GPU as XLA's text proto
    triton_text               fields of jaxlib/gpu/triton.proto
    find                      the parameters of jax-triton's primitive

With JAX 0.12: delete ``link*`` and ``pallas_kernels/pdl.py`` if a step's CUDA graph lets Mosaic
kernels begin early there (docs/notes/0018-jax-0.12.md); check ``mosaic_gpu_v2``, its attributes and
Mosaic's cache by hash, without which a call must hold its kernel's source again; delete
``triton_text`` when jax-triton leaves the text out.
"""
