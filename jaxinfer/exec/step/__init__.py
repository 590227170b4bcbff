"""The step as pure functions: batch, forward, sampling, slots."""
