"""The op sparse_attention; see ``api``."""
