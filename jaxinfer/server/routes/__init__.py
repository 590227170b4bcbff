"""The application: every route's handler, and the service that all handlers share."""
