"""Data only: known models (``models/``), engine settings per device (``engine/``), a board."""
