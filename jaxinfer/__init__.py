"""jaxinfer."""
