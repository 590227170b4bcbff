"""One token of the gated delta rule per row, with its convolution and its norms."""
