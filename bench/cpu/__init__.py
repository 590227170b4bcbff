"""``python -m bench.cpu``: tokens per second on the CPU, beside other engines."""
