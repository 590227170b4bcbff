"""GEMM of tokens with gate and up weights, and SwiGLU of the results, in one kernel."""
