"""Residual add of a GEMM's output, the norm of the sum, and the GEMM after it."""
