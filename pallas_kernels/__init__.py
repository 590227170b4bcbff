"""Floor 0: kernels as ops: definition, implementations, test cases. Never imports jaxinfer."""
