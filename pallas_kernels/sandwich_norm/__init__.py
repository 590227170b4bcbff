"""Between two blocks: normalise the first one's output, add it, and normalise the sum."""
