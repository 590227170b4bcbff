"""quantised_gemm on NVIDIA Hopper, with weights that are stored in tiles."""
