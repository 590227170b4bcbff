"""Between two GEMMs: add the first one's output to the residual stream and normalise the sum."""
