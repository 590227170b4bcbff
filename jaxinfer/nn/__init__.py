"""Floor 2: Flax building blocks and the KV state. Knows core and pallas_kernels, no family."""
