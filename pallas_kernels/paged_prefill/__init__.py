"""Causal attention of ragged chunks of queries over their rows' pages."""
