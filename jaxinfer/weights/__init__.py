"""Floor 4: from a model reference to parameters on the device."""
