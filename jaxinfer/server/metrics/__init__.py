"""The server's counters and histograms, for Prometheus and for people."""
