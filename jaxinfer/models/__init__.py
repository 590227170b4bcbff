"""Floor 3: one file per model family, found through the registry."""
