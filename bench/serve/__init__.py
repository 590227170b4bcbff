"""``python -m bench.serve``: latency and throughput of a running server."""
