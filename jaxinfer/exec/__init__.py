"""Floor 4: the pure step function, its buckets, and the executor that runs compiled steps."""
