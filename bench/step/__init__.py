"""``python -m bench.step``: speed and memory of the public API on one device."""
