"""``python -m bench.accuracy``: what an engine's numerics cost."""
