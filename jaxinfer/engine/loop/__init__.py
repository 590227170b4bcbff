"""The loop: validated requests to the scheduler and the executor, tokens back to text."""
