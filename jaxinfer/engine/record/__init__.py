"""Recordings of an engine: what the scheduler was given and decided, and their replay."""
