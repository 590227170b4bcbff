"""quantised_gemm of many tokens on NVIDIA Hopper."""
