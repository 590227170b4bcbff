"""Floor 2: Flax modules that families are built from, and the layer state."""
