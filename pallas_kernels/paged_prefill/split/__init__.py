"""The keys of a tile in several splits, for few queries of long contexts."""
