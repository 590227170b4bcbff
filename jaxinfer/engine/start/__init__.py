"""From settings to a running engine: what is planned, loaded, built, and the way there."""
