"""GEMM of tokens with a quantised weight matrix."""
