"""Mixers, which combine the tokens of a sequence: attention."""
