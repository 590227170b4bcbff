"""Kernels for CPUs in C++, called through XLA's foreign function interface."""
