"""A decode step's attention: append one new token per row, attend over its pages."""
