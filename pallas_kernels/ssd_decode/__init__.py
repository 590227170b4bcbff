"""A token of the state space of Mamba-2 in each row."""
