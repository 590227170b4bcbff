"""Gate, up, SwiGLU and down of a feed-forward network with quantised weights."""
