"""The product of few rows with a large matrix."""
