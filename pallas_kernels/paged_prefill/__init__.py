"""Causal attention of ragged chunks of queries over the pages of their rows."""
