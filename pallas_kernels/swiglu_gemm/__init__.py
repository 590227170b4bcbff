"""The product of tokens with gates and ups, and their SwiGLU, in one pass."""
