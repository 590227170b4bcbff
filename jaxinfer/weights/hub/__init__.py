"""Models of the Hugging Face hub: names, needed files, transfers, and the hub's cache."""
