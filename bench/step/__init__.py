"""``python -m bench.step``: what the public API gives on one device."""
