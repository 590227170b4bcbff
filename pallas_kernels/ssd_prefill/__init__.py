"""The state space of Mamba-2 over prompts."""
