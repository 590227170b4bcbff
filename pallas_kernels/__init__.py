"""Floor 0: kernels as ops: a definition, implementations, test cases. Never imports jaxinfer."""
