"""``/openapi.json``."""
