"""The op sparse_latent; see ``api``."""
