"""The engine's loop: requests to the scheduler and the executor, tokens back to text."""
