"""The feed-forward networks of a mixture of experts, each of the tokens that chose it."""
