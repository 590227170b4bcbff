"""What a product adds to the residual stream, the norm of that, and the product after it."""
