"""Floor 5: requests in, text out; the loop between the pure scheduler and the executor."""
