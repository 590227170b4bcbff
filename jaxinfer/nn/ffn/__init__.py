"""Feed-forward networks, which process each token separately."""
