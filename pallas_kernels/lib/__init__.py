"""What kernels and their definitions are made of."""
