"""Between a product and the next one: add it to the residual stream, normalise the sum."""
