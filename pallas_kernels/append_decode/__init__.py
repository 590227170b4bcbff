"""Attention of a decode step: append one token per row, then attend over the row's pages."""
