"""Sampling a token per row from its logits, without sorting the vocabulary."""
