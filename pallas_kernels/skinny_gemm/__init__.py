"""The product of few rows with a large matrix, with what surrounds it in a layer."""
