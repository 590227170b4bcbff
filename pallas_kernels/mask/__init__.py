"""Masks of a step's logits, which the host writes while the step runs."""
