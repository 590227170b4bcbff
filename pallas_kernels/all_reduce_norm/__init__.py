"""The sum of partial results over devices, added to the residual stream and normalised."""
