"""Parts of kernels and of their definitions."""
