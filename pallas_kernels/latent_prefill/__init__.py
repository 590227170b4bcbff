"""Latent attention of prompts: expanded within a chunk, absorbed over earlier tokens."""
