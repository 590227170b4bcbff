"""Floor 2: the purely functional scheduler: ``schedule(state, events) -> (state, output)``."""
