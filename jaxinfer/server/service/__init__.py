"""Under all handlers: the service, one request's call, limits, rendering."""
