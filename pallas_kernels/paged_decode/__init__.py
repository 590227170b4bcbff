"""Attention of one query per row over the row's pages."""
