"""Data only: known models (``models/``) and engine settings per device (``engine/``)."""
