"""``python -m bench.accuracy``: the error of an engine's numerics."""
