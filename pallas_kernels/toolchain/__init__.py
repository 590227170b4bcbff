"""Compiles the kernels of traced steps ahead of XLA. Steps also work without it, but start slower.

An engine uses ``api.Toolchain`` only. An op uses ``kernel_call.call_lowered`` only, through
``registry.imported_when_called``.

    find            the kernels in a trace, and how to compile one in Triton
    kernel_call     a Mosaic kernel as a primitive: lowered once for all executables of a process
    pool, worker    processes that lower and compile Mosaic kernels
    machine_code    a Mosaic kernel compiled in one process and loaded in another
    link*           neighbouring Mosaic kernels as one custom call with programmatic dependent
                    launch: StableHLO (link), Mosaic modules (link_modules), host code (link_host)
    triton_text     drops Triton's IR from the calls of its kernels
    torch_hidden    keeps Triton from importing PyTorch

It is written for jax and jaxlib 0.11.2, jax-triton 0.4.1 and Triton 3.7, which pyproject.toml pins.
Its uses of JAX beyond the documented API are in ``jax_internals``, except for formats, each of
which is read in one file:

    link_modules, link_host   how Mosaic lays out a kernel's module and launches it: ``gpu.launch``
                              in one ``func.func``, ``mosaic_gpu_launch_kernel``, the CUDA driver's
                              functions that Mosaic's runtime exports (jaxlib/mosaic/gpu)
    machine_code              Mosaic's cache of compiled kernels by ``kernel_hash``, one a process,
                              which loading an executable also fills (custom_call.cc); XLA's text
                              proto of an NVIDIA GPU
    triton_text               fields of jaxlib/gpu/triton.proto
    find                      the parameters of jax-triton's primitive

With JAX 0.12: delete ``link*`` and ``lib/pdl.py`` if Mosaic kernels of separate calls can overlap
in a step's CUDA graph (docs/notes/0018-jax-0.12.md); check ``mosaic_gpu_v2``, its attributes and
Mosaic's cache by hash, without which a call needs its kernel's source again; delete ``triton_text``
when jax-triton leaves out the text.
"""
