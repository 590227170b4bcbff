"""Absorbed latent attention of a decode step: append a token per row, then attend."""
