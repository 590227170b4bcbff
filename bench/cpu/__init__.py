"""``python -m bench.cpu``: tokens per second on the CPU, compared with other engines."""
