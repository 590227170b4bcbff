"""GEMM of dynamically quantised tokens with 8-bit floating-point weights, for NVIDIA Hopper."""
