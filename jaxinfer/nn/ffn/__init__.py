"""What a layer does to each token on its own: feed-forward networks."""
