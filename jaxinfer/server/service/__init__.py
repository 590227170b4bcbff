"""What handlers stand on: the service, one request's call, limits, rendering."""
