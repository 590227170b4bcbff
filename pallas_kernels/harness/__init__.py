"""How an op is chosen, pinned, tuned and tested."""
