"""The entries before a step in several splits, for few queries of long contexts."""
