"""What the server counts: the numbers, and how Prometheus and people read them."""
