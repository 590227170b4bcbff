"""Sums over a row whose bits do not depend on the other rows, on a GPU."""
