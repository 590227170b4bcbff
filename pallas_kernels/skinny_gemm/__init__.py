"""GEMM of a few rows with a large matrix."""
