"""Floor 1: the words every other floor shares. Standard library, numpy and msgspec only."""
