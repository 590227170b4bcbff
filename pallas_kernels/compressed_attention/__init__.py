"""The op compressed_attention; see ``api``."""
